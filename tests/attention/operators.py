"""The custom operators that a compiled call reaches, and their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from attention import Attention
from attention.check.system import Recorder


def compiled(attend: Attention, calls: dict[Any, tuple[Any, Any]]) -> Any:
    """`attend` as one graph; when it is called, forward or backward, `calls` gets each operator's arguments."""

    def recording(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(lambda *args: Recorder(graph, calls).run(*args))

    return torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=recording, bw_compiler=recording))

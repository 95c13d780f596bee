"""The custom operators that a compiled call reaches, and their arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._pytree import tree_map_only

from attention import Attention, AttentionOutput
from tests.attention.reference import gradients
from tests.equal import assert_equal

Calls = dict[Any, tuple[Any, Any]]  # of operators: the positional and the named arguments
BUILTIN = {"aten", "prims", "prim", "inductor", "higher_order", "profiler", "_c10d_functional", "cuda"}


class Recorder(torch.fx.Interpreter):
    """Runs a graph, and records the arguments of the first call of each operator that is not part of torch."""

    def __init__(self, graph: torch.fx.GraphModule, calls: Calls) -> None:
        super().__init__(graph)
        self.calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in BUILTIN and target not in self.calls:
            self.calls[target] = tree_map_only(Tensor, lambda x: x.detach(), (args, kwargs))
        return super().call_function(target, args, kwargs)


def compiled(attend: Attention | Callable[..., AttentionOutput], calls: Calls) -> Any:
    """`attend` as one graph; when it is called, forward or backward, `calls` gets each operator's arguments."""

    def recording(graph, _):
        return make_boxed_func(lambda *args: Recorder(graph, calls).run(*args))

    return torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=recording, bw_compiler=recording))


def check_calls(calls: Calls) -> None:
    """Each operator keeps torch's rules."""
    for operator, (args, kwargs) in calls.items():
        torch.library.opcheck(operator, args, kwargs)


def assert_operators_keep_torchs_rules(
    attend: Callable[..., AttentionOutput], *tensors: Tensor, **others: Tensor
) -> list[str]:
    """Compiled, as the arguments of `gradients`, it gives the same bits; returns the operators' names."""
    calls = Calls()
    eager, found = (gradients(f, *tensors, **others) for f in (attend, compiled(attend, calls)))
    assert_equal(found, eager)
    check_calls(calls)
    return [operator.overloadpacket.__name__ for operator in calls]

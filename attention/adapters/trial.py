"""One small call of an implementation, to learn before training whether another library's kernels take a shape."""

import warnings

import torch

from ..dropout import DropoutKey
from ..errors import Option, UnsupportedAttention
from ..interface import Attention, AttentionShape
from ..layout import Layout, documents

REFUSALS = (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError)  # as libraries raise them


def attend_once(attend: Attention, shape: AttentionShape, chosen: Option, instead: Option) -> None:
    """Attend, forward and backward, on two tokens of this shape, dtype and device.

    chosen   what the user chose, and `instead` what helps where the kernels refuse

    Raises UnsupportedAttention with the reason that the library gives in its error, or torch's SDPA in warnings.
    """
    devices = [shape.device] if shape.device.type == "cuda" else []
    q, k = (
        torch.zeros(1, n, 2, shape.head_dim, dtype=shape.dtype, device=shape.device, requires_grad=True)
        for n in (shape.n_heads, shape.n_kv_heads)
    )
    layout = documents(torch.zeros(1, 2, dtype=torch.int32, device=shape.device)) if shape.documents else Layout()
    with warnings.catch_warnings(record=True) as reasons, torch.random.fork_rng(devices):
        warnings.simplefilter("always")
        try:
            for score in set(shape.scores):
                tensors = {x.name: x.initial(shape.n_heads, shape.device) for x in score.head_tensors}
                key = DropoutKey(0, 0, 0, 0)
                attend(q, k, k, score=score, layout=layout, dropout_key=key, tensors=tensors).out.sum().backward()
        except (UnsupportedAttention, torch.OutOfMemoryError):
            raise
        except REFUSALS as error:
            why = str(error).partition("\n")[0].rstrip(". ")
            if "No available kernel" in why:  # torch's SDPA gives its reasons in warnings
                messages = [str(reason.message).split(" (Triggered")[0].rstrip(". ") for reason in reasons]
                why = "; ".join(reason for reason in messages if not reason.endswith(":"))  # less the headings
            raise UnsupportedAttention(
                f"{{}} does not support {shape.n_heads} heads ({shape.n_kv_heads} for keys) of size "
                f"{shape.head_dim} in {shape.dtype} on {shape.device} ({{}}); use {{}}.",
                chosen,
                why,
                instead,
            ) from None

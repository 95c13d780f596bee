"""The user's choice of attention: an implementation and its options."""

from dataclasses import dataclass, fields
from enum import Enum

from .errors import AttentionError, Option


class Ablation(Enum):
    """A line of the online softmax to leave out (experiment=break_it)."""

    none = "none"
    no_max_subtraction = "no_max_subtraction"
    no_rescaling = "no_rescaling"


class DropoutRng(Enum):
    """The source of dropout's random bits."""

    replay = "replay"  # keep_mask: the same mask for every implementation, tile size, device and rank
    torch = "torch"  # the backend's generator, whose masks no other implementation can reproduce


class SDPABackend(Enum):
    """The backend of torch's scaled_dot_product_attention; `auto` leaves the choice to torch."""

    auto = "auto"
    flash = "flash"
    efficient = "efficient"
    cudnn = "cudnn"
    math = "math"


class KernelPath(Enum):
    """The kernels of attention=flash; `auto` takes the fastest by measurement (flash/paths.py)."""

    auto = "auto"
    plain = "plain"
    hopper = "hopper"


class ProductPrecision(Enum):
    """The precision of the products of attention=flash: as q, k and v, or fp8 (flash/forward.py)."""

    inputs = "inputs"
    fp8 = "fp8"


@dataclass
class AttentionConfig:
    """The options under `attention.*`.

    name       an implementation, or <file>.py:<class or function>
    dropout    probability of dropping an attention weight, in steps of 1/256
    rng        source of dropout's random bits; only sdpa takes `torch`
    block_q    rows of a score tile: queries (tiled)
    block_k    columns of a score tile: keys (tiled)
    ablate     leave out one line of the online softmax (tiled)
    backend    which of torch's kernels to use (sdpa)
    allow_tf32 let fp32 matrix products round their inputs to TF32 (flash)
    path       the kernels to use: plain ones for every GPU, or those for Hopper (flash)
    precision  of the products: that of q, k and v, or e4m3, for evaluation and inference (flash)

    Every implementation reads `name` and `dropout`; an option it does not read is refused unless left at its default.
    Options with a choice take it by name too: path="plain". Raises AttentionError for an unknown choice.
    """

    name: str = "naive"
    dropout: float = 0.0
    rng: DropoutRng = DropoutRng.replay
    block_q: int = 64
    block_k: int = 64
    ablate: Ablation = Ablation.none
    backend: SDPABackend = SDPABackend.auto
    allow_tf32: bool = False
    path: KernelPath = KernelPath.auto
    precision: ProductPrecision = ProductPrecision.inputs

    def __post_init__(self) -> None:
        for option in fields(self):
            if isinstance(option.default, Enum):
                choices, value = type(option.default), getattr(self, option.name)
                try:
                    setattr(self, option.name, choices(value))
                except ValueError:
                    names = ", ".join(choice.value for choice in choices)
                    named = Option(f"attention.{option.name}", value)
                    raise AttentionError("{} is not one of {}.", named, names) from None

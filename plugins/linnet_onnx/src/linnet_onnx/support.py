"""What ONNX Runtime's kernels can do, stated before it is asked: a refusal here is a sentence.

Read off the kernels of 1.32; a test holds each line against the runtime that is installed.
"""

from dataclasses import dataclass

from linnet.spec.types import Dim

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DTYPES = {"cpu": ("f32", "int8", "int4"), "cuda": ("f32", "f16", "bf16")}
"""What each device multiplies in; int8 and int4 are weights in blocks. On a CPU there are no
products in f16 and bf16: the runtime would cast every weight to f32 at every step."""


@dataclass(frozen=True)
class Rotary:
    """Rotary positions inside the attention kernel: one frequency for each pair."""

    frequencies: tuple[float, ...]
    scale: float

    def fits(self, size: Dim) -> bool:
        """Whether the kernel turns this many pairs of a head of ``size``."""
        pairs = len(self.frequencies)
        return isinstance(size, int) and size % 16 == 0 and pairs % 8 == 0 and 2 * pairs <= size


def attention_refusal(dtype: str, size: Dim, value_size: Dim, window: int | None) -> str | None:
    """Why ``GroupQueryAttention`` cannot be one attention; None where it can."""
    if dtype not in ("f32", "f16", "bf16"):
        return f"GroupQueryAttention has no {dtype}"
    if not isinstance(size, int) or size % 8:
        return f"GroupQueryAttention takes heads of a multiple of 8, not of {size}"
    if size != value_size:
        return f"GroupQueryAttention takes keys and values of one size, not {size} and {value_size}"
    if window == 1:
        return "GroupQueryAttention reads a window of 1 as none"
    return None

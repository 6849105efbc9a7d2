"""How GGUF files store numbers: ggml's types, as a table."""

from dataclasses import dataclass

from linnet.spec.types import DType


@dataclass(frozen=True)
class Encoding:
    """A ggml type. ``block`` numbers take ``block_bytes``; ``dtype`` is what reading gives."""

    name: str
    number: int
    block: int
    block_bytes: int
    dtype: DType

    @property
    def is_plain(self) -> bool:
        """Whether the file holds the numbers themselves."""
        return self.block == 1


ENCODINGS = {
    encoding.number: encoding
    for encoding in (
        Encoding("f32", 0, 1, 4, DType.F32),
        Encoding("f16", 1, 1, 2, DType.F16),
        Encoding("bf16", 30, 1, 2, DType.BF16),
        Encoding("q4_0", 2, 32, 18, DType.F32),
        Encoding("q4_1", 3, 32, 20, DType.F32),
        Encoding("q5_0", 6, 32, 22, DType.F32),
        Encoding("q5_1", 7, 32, 24, DType.F32),
        Encoding("q8_0", 8, 32, 34, DType.F32),
        Encoding("q2_k", 10, 256, 84, DType.F32),
        Encoding("q3_k", 11, 256, 110, DType.F32),
        Encoding("q4_k", 12, 256, 144, DType.F32),
        Encoding("q5_k", 13, 256, 176, DType.F32),
        Encoding("q6_k", 14, 256, 210, DType.F32),
    )
}
"""What is read, by ggml's number for it."""

UNSUPPORTED = {
    9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl",
    21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
}  # fmt: skip
"""Other ggml types, so that one can be refused by its name."""

"""Writing GGUF files: metadata, then tensors one at a time, in the encoding asked for.

The layout and the arithmetic of the blocks are the ``gguf`` library's. Knows nothing of what a
tensor is for.
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from linnet.errors import UnavailableError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast, cast_bytes
from linnet_gguf.container import Value
from linnet_gguf.encodings import ENCODINGS, Encoding

BY_NAME = {encoding.name: encoding for encoding in ENCODINGS.values()}
CHUNK = 1 << 18
"""Numbers encoded at a time: what stays in cache, and adds nothing to the peak."""


@dataclass(frozen=True)
class TensorOut:
    """A tensor to write: ``read`` gives its values, floats of ``shape``, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    read: Callable[[], Array]

    def __post_init__(self) -> None:
        if self.shape[-1] % self.encoding.block:
            raise UnavailableError(
                f"{self.name} has rows of {self.shape[-1]} numbers, not a multiple of the "
                f"{self.encoding.block} that a block of {self.encoding.name} holds: export this "
                "model as f32, f16 or bf16"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of its values in the file."""
        return math.prod(self.shape) // self.encoding.block * self.encoding.block_bytes


def write_gguf(
    path: Path, arch: str, metadata: Mapping[str, Value], tensors: Sequence[TensorOut]
) -> None:
    """Write a file. Metadata keeps its order; empty strings and arrays are left out.

    Raises CheckpointError for values that an encoding cannot hold.
    """
    writer = _Writer(path, arch)
    try:
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name,
                tensor.shape,
                np.dtype(np.float32),
                tensor.nbytes,
                gguf.GGMLQuantizationType(tensor.encoding.number),
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(encode(tensor.read(), tensor.encoding, tensor.name))
    finally:
        writer.close()


class _Writer(gguf.GGUFWriter):
    """The library's writer, with arrays of strings packed at once: vocabularies have 100,000s."""

    def _pack_val(
        self,
        val: Any,
        vtype: gguf.GGUFValueType,
        add_vtype: bool,
        sub_type: gguf.GGUFValueType | None = None,
    ) -> bytes:
        if not isinstance(val, list) or not all(type(item) is str for item in val):
            return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))
        packed = [struct.pack("<I", vtype)] if add_vtype else []
        packed.append(struct.pack("<IQ", gguf.GGUFValueType.STRING, len(val)))
        for item in val:
            raw = item.encode()
            packed += struct.pack("<Q", len(raw)), raw
        return b"".join(packed)


def encode(values: Array, encoding: Encoding, name: str) -> Array:
    """Floats as the bytes that the file holds, u8 ``[nbytes]``."""
    if encoding.is_plain:
        return cast_bytes(values, encoding.dtype, name)
    return np.concatenate(list(_blocks(values, encoding, name)))


def _blocks(values: Array, encoding: Encoding, name: str) -> Iterable[Array]:
    kind = gguf.GGMLQuantizationType(encoding.number)
    flat = values.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        numbers = cast(flat[start : start + CHUNK], DType.F32, name)
        # As one long row: the library works through 16 rows at a time otherwise.
        yield gguf.quants.quantize(numbers.reshape(1, -1), kind).reshape(-1)


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, np.ndarray):
        writer.add_array(key, value.tolist())
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)

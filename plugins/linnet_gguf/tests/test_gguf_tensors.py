"""Reading tensors: every encoding against its definition written out number by number."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from linnet_gguf.container import read_container
from linnet_gguf.encodings import ENCODINGS
from linnet_gguf.tensors import CHUNK, read_tensor

Numbers = Iterator[float]


def f16(raw: bytes) -> float:
    return float(np.frombuffer(raw, "<f2")[0])


def nibbles(raw: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [b & 15 for b in raw] + [b >> 4 for b in raw]


def fifth_bits(raw: bytes) -> list[int]:
    word = int.from_bytes(raw, "little")
    return [word >> i & 1 for i in range(32)]


def q4_0(b: bytes) -> Numbers:
    yield from (f16(b[:2]) * (q - 8) for q in nibbles(b[2:]))


def q4_1(b: bytes) -> Numbers:
    yield from (f16(b[:2]) * q + f16(b[2:4]) for q in nibbles(b[4:]))


def q5_0(b: bytes) -> Numbers:
    high = fifth_bits(b[2:6])
    yield from (f16(b[:2]) * ((q | h << 4) - 16) for q, h in zip(nibbles(b[6:]), high, strict=True))


def q5_1(b: bytes) -> Numbers:
    high = fifth_bits(b[4:8])
    for q, h in zip(nibbles(b[8:]), high, strict=True):
        yield f16(b[:2]) * (q | h << 4) + f16(b[2:4])


def q8_0(b: bytes) -> Numbers:
    yield from (f16(b[:2]) * int(q) for q in np.frombuffer(b[2:], np.int8))


def six_bit_pair(s: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum of sub-block j, packed in 12 bytes, of the 4- and 5-bit K types."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def q2_k(b: bytes) -> Numbers:
    scales, qs, d, dmin = b[:16], b[16:80], f16(b[80:82]), f16(b[82:84])
    for i in range(256):
        half, shift, at = i // 128, i % 128 // 32, i % 32
        scale = scales[i // 16]
        q = qs[half * 32 + at] >> 2 * shift & 3
        yield d * (scale & 15) * q - dmin * (scale >> 4)


def q3_k(b: bytes) -> Numbers:
    hmask, qs, s, d = b[:32], b[32:96], b[96:108], f16(b[108:110])
    for i in range(256):
        half, shift, at = i // 128, i % 128 // 32, i % 32
        j = i // 16
        low = s[j] & 15 if j < 8 else s[j - 8] >> 4
        scale = (low | (s[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32
        q = qs[half * 32 + at] >> 2 * shift & 3
        high = hmask[at] >> (half * 4 + shift) & 1
        yield d * scale * (q - (0 if high else 4))


def q4_k(b: bytes) -> Numbers:
    d, dmin, s, qs = f16(b[:2]), f16(b[2:4]), b[4:16], b[16:]
    for i in range(256):
        scale, least = six_bit_pair(s, i // 32)
        q = qs[i // 64 * 32 + i % 32] >> 4 * (i % 64 // 32) & 15
        yield d * scale * q - dmin * least


def q5_k(b: bytes) -> Numbers:
    d, dmin, s, qh, qs = f16(b[:2]), f16(b[2:4]), b[4:16], b[16:48], b[48:]
    for i in range(256):
        scale, least = six_bit_pair(s, i // 32)
        q = qs[i // 64 * 32 + i % 32] >> 4 * (i % 64 // 32) & 15
        yield d * scale * (q | (qh[i % 32] >> (i // 32) & 1) << 4) - dmin * least


def q6_k(b: bytes) -> Numbers:
    ql, qh, scales, d = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8), f16(b[208:])
    for i in range(256):
        half, quarter, at = i // 128, i % 128 // 32, i % 32
        low = ql[half * 64 + (quarter % 2) * 32 + at] >> 4 * (quarter // 2) & 15
        high = qh[half * 32 + at] >> 2 * quarter & 3
        yield d * int(scales[i // 16]) * ((low | high << 4) - 32)


DEFINITIONS: dict[str, Callable[[bytes], Numbers]] = {
    "q4_0": q4_0, "q4_1": q4_1, "q5_0": q5_0, "q5_1": q5_1, "q8_0": q8_0,
    "q2_k": q2_k, "q3_k": q3_k, "q4_k": q4_k, "q5_k": q5_k, "q6_k": q6_k,
}  # fmt: skip
SCALES_AT = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2)} | {
    "q5_k": (0, 2),
    "q6_k": (208,),
}


def random_blocks(name: str, rows: int, width: int) -> np.ndarray:
    """Random bits, but for the f16 scales, which must be finite."""
    encoding = next(e for e in ENCODINGS.values() if e.name == name)
    rng = np.random.default_rng(7)
    count = rows * width // encoding.block
    blocks = rng.integers(0, 256, (count, encoding.block_bytes), np.uint8)
    for at in SCALES_AT.get(name, (0,)):
        scales = rng.uniform(-2, 2, count).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks.reshape(rows, -1)


def write(path: Path, name: str, values: np.ndarray, kind: str | None = None) -> Any:
    writer = gguf.GGUFWriter(path, "test")
    raw = None if kind is None else gguf.GGMLQuantizationType[kind.upper()]
    writer.add_tensor(name, values, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_container(path)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_blocks_are_decoded_as_defined(name: str, tmp_path: Path) -> None:
    raw = random_blocks(name, 3, 512)
    container = write(tmp_path / "t.gguf", "t", raw, name)
    encoding = container.tensors["t"].encoding
    blocks = raw.reshape(-1, encoding.block_bytes)
    expected = np.array([list(DEFINITIONS[name](block.tobytes())) for block in blocks])
    result = read_tensor(container.data, container.tensors["t"])
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected.reshape(3, 512), rtol=1e-6, atol=1e-4)


def test_the_table_agrees_with_the_library() -> None:
    for number, encoding in ENCODINGS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name.lower() == encoding.name
        assert gguf.GGML_QUANT_SIZES[kind] == (encoding.block, encoding.block_bytes)


def test_chunks_and_row_orders_do_not_change_values(tmp_path: Path) -> None:
    width, rows = 256, 3 * CHUNK // 256 + 5
    raw = random_blocks("q8_0", rows, width)
    container = write(tmp_path / "t.gguf", "t", raw, "q8_0")
    info = container.tensors["t"]
    whole = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(read_tensor(container.data, info), whole)
    order = np.random.default_rng(0).permutation(rows)
    np.testing.assert_array_equal(read_tensor(container.data, info, order), whole[order])


def test_plain_types_keep_their_bits(tmp_path: Path) -> None:
    bits = np.array([[0x0001, 0x8000, 0x7F80], [0x3F80, 0xC2C8, 0x0080]], np.uint16)
    container = write(tmp_path / "b.gguf", "t", bits.view(np.uint8), "bf16")
    values = read_tensor(container.data, container.tensors["t"])
    assert values.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(values.view(np.uint16), bits)
    for dtype in (np.float32, np.float16):
        values = np.arange(6, dtype=dtype).reshape(2, 3)
        container = write(tmp_path / "f.gguf", "t", values)
        read = read_tensor(container.data, container.tensors["t"])
        assert read.dtype == dtype
        assert not read.flags.writeable  # A view of the file, not a copy.
        np.testing.assert_array_equal(read, values)
        reordered = read_tensor(container.data, container.tensors["t"], np.array([1, 0]))
        np.testing.assert_array_equal(reordered, values[::-1])

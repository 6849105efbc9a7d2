"""The container: damaged and hostile files, and the limits on what refusing one may cost."""

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linnet.errors import CheckpointError
from linnet_gguf.container import read_container
from linnet_gguf.reader import GGUFFormat

U32, STRING, ARRAY = 4, 8, 9
F32, F16 = 0, 1


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def tensor(name: bytes, dims: list[int], offset: int, kind: int = F32) -> bytes:
    return text(name) + u32(len(dims)) + u64(*dims) + u32(kind) + u64(offset)


def file(
    *,
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    header = b"GGUF" + u32(version) + u64(*(counts or (len(tensors), len(keys))))
    header += b"".join(tensors) if keys is None else b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data if tensors else header


GOOD = file(
    keys=[key(b"k", U32, u32(7)), key(b"s", ARRAY, u32(STRING) + u64(2) + text(b"a") + text(b"b"))],
    tensors=[tensor(b"one", [3, 2], 0), tensor(b"two", [4], 32, F16)],
    data=np.arange(6, dtype="<f4").tobytes() + bytes(8) + np.arange(4, dtype="<f2").tobytes(),
)

HOSTILE = {
    "empty": (b"", "is empty"),
    "not GGUF": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (file(version=1), "version 1"),
    "version 4": (file(version=4), "version 4"),
    "keys 2^60": (file(counts=(0, 2**60)), f"{2**60} metadata keys"),
    "keys beyond the file": (file(counts=(0, 1000)), "more than its"),
    "tensors 2^60": (file(counts=(2**60, 0)), f"{2**60} tensors"),
    "tensors beyond the file": (file(counts=(1000, 0)), "more than its"),
    "key length 2^40": (file(counts=(0, 1)) + u64(2**40) + bytes(20), f"{2**40} bytes"),
    "string length 2^40": (file(keys=[key(b"k", STRING, u64(2**40))]), f"{2**40} bytes"),
    "string length 2^63": (file(keys=[key(b"k", STRING, u64(2**63))]), f"{2**63} bytes"),
    "string beyond the file": (file(keys=[key(b"k", STRING, u64(2**20))]), "cut short"),
    "array of 2^60 strings": (
        file(keys=[key(b"k", ARRAY, u32(STRING) + u64(2**60))]),
        f"{2**60} strings",
    ),
    "array of 2^22 strings": (
        file(keys=[key(b"k", ARRAY, u32(STRING) + u64(2**22))]),
        "more than its",
    ),
    "string in an array": (
        file(keys=[key(b"k", ARRAY, u32(STRING) + u64(2) + text(b"a") + u64(2**62))]),
        "item 1 of k",
    ),
    "array of 2^62 numbers": (
        file(keys=[key(b"k", ARRAY, u32(U32) + u64(2**62))]),
        f"{2**64} bytes",
    ),
    "nested arrays": (
        file(keys=[key(b"k", ARRAY, u32(ARRAY) + u64(1) + u32(ARRAY) + u64(1))]),
        "array of arrays",
    ),
    "value type 99": (file(keys=[key(b"k", 99, u32(0))]), "value type 99"),
    "array type 99": (file(keys=[key(b"k", ARRAY, u32(99) + u64(1))]), "value type 99"),
    "truth value 2": (file(keys=[key(b"k", 7, b"\x02")]), "byte 2 for a truth value"),
    "key twice": (file(keys=[key(b"k", U32, u32(1)), key(b"k", U32, u32(2))]), "'k' twice"),
    "key not UTF-8": (file(keys=[key(b"\xff", U32, u32(1))]), "not UTF-8"),
    "string not UTF-8": (
        file(keys=[key(b"k", ARRAY, u32(STRING) + u64(1) + text(b"\xf0\x9f"))]),
        "item 0 of k is not UTF-8",
    ),
    "alignment 0": (file(keys=[key(b"general.alignment", U32, u32(0))]), "alignment is 0"),
    "alignment 48": (file(keys=[key(b"general.alignment", U32, u32(48))]), "alignment is 48"),
    "alignment 2^30": (
        file(keys=[key(b"general.alignment", U32, u32(2**30))]),
        f"alignment is {2**30}",
    ),
    "alignment text": (file(keys=[key(b"general.alignment", STRING, text(b"x"))]), "is 'x'"),
    "0 dimensions": (file(tensors=[tensor(b"t", [], 0) + bytes(64)]), "0 dimensions"),
    "10^6 dimensions": (
        file(counts=(1, 0)) + text(b"t") + u32(10**6) + bytes(64),
        "1000000 dimensions",
    ),
    "dimension 0": (file(tensors=[tensor(b"t", [4, 0], 0)]), "size 0"),
    "dimension -1": (file(tensors=[tensor(b"t", [2**64 - 1], 0)], data=bytes(32)), "cut short"),
    "2^32 x 2^32": (file(tensors=[tensor(b"t", [2**32, 2**32], 0)], data=bytes(32)), "cut short"),
    "unknown type": (file(tensors=[tensor(b"t", [4], 0, 99)], data=bytes(32)), "ggml type 99"),
    "unsupported type": (file(tensors=[tensor(b"t", [32], 0, 20)], data=bytes(32)), "iq4_nl"),
    "row not in blocks": (file(tensors=[tensor(b"t", [33], 0, 8)], data=bytes(64)), "rows of 33"),
    "tensor twice": (
        file(tensors=[tensor(b"t", [4], 0), tensor(b"t", [4], 32)], data=bytes(64)),
        "'t' twice",
    ),
    "overlap": (
        file(tensors=[tensor(b"a", [16], 0), tensor(b"b", [4], 32)], data=bytes(64)),
        "offset 32, where 64",
    ),
    "gap": (
        file(tensors=[tensor(b"a", [4], 0), tensor(b"b", [4], 64)], data=bytes(96)),
        "offset 64, where 32",
    ),
    "not aligned": (file(tensors=[tensor(b"a", [4], 8)], data=bytes(32)), "offset 8, where 0"),
    "offset 2^63": (file(tensors=[tensor(b"a", [4], 2**63)], data=bytes(32)), "offset"),
    "10 bytes short": (GOOD[:-10], "cut short"),
    "bytes after the end": (GOOD + bytes(64), "more than its tensors need"),
    "name of 2^20 bytes": (file(counts=(1, 0)) + u64(2**20) + bytes(64), f"{2**20} bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_at_no_cost(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    assert len(content) <= 400
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(CheckpointError) as caught:
            GGUFFormat().open(path)
        seconds = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert seconds < 0.2
    assert peak < 50 << 20


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD + bytes(24))  # Padding after the last tensor is usual.
    container = read_container(path)
    assert (container.version, container.metadata) == (3, {"k": 7, "s": ["a", "b"]})
    assert container.tensors["one"].shape == (2, 3)
    assert container.tensors["two"].encoding.name == "f16"


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.gguf"
    path.write_bytes(GOOD.replace(b"GGUF\x03", b"GGUF\x02"))
    assert read_container(path).version == 2


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(CheckpointError):
            read_container(path)


def test_a_larger_alignment_is_honoured(tmp_path: Path) -> None:
    header = b"GGUF" + u32(3) + u64(1, 1) + key(b"general.alignment", U32, u32(256))
    header += tensor(b"t", [4], 0)
    path = tmp_path / "aligned.gguf"
    path.write_bytes(header + bytes(-len(header) % 256) + np.arange(4, dtype="<f4").tobytes())
    assert read_container(path).tensors["t"].offset == 256


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "mutated.gguf"


EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.one_of(
            st.binary(min_size=1, max_size=1),
            st.sampled_from([0, 1, 2**31, 2**32 - 1]).map(u32),
            st.sampled_from([0, 1, 2**20, 2**40, 2**63, 2**64 - 1]).map(u64),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=EDITS, keep=st.one_of(st.just(1.0), st.floats(0, 1)))
def test_a_mutated_file_is_refused_or_read(
    edits: list[tuple[float, bytes]],
    keep: float,
    scratch: Path,
    make_llama: Callable[..., Any],
) -> None:
    original = scratch.with_name("original.gguf")
    if not original.exists():
        model = make_llama(layers=1, biases=True)
        model.tensors["rope_freqs.weight"] = np.full(8, 2, np.float32)
        model.metadata["llama.rope.scaling.original_context_length"] = 64
        model.write(original)
    content = bytearray(original.read_bytes())
    header = content.rindex(b"output.weight") + 64
    for where, new in edits:
        at = int(where * (header - len(new)))
        content[at : at + len(new)] = new
    scratch.write_bytes(content[: int(keep * len(content))])
    try:
        checkpoint = GGUFFormat().open(scratch)
    except CheckpointError:
        return
    for stored in checkpoint.tensors.values():
        assert stored.read().shape == stored.shape

"""Reading and writing safetensors files, against the safetensors library and against hostility."""

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import dtype_of, numpy_dtype
from linnet.weights.safetensors import (
    CODES,
    Entry,
    entries_of,
    read_file,
    write_file,
    write_sharded,
)

MIB = 1 << 20


def entry(name: str, values: Array) -> Entry:
    return Entry(name, dtype_of(values.dtype), values.shape, lambda: values)


def draw(name: str, *shape: int, dtype: DType = DType.F32) -> Array:
    values = np.random.default_rng(list(name.encode())).standard_normal(shape)
    return values.astype(numpy_dtype(dtype))


def file_of(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.fixture
def few_files() -> Iterator[None]:
    """No more than eight files may be opened beside those that are."""
    resource = pytest.importorskip("resource")
    with Path(os.devnull).open() as file:
        next_free = file.fileno()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free + 8, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def tensor(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


TWICE = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
TWICE += b'"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
KEY_TWICE = b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}'
DIGITS = b'{"a":{"dtype":"F32","shape":[%b,%b],"data_offsets":[0,4]}}' % ((b"9" * 4200,) * 2)

HOSTILE = {
    "nothing": (b"", "0 bytes are too few"),
    "seven bytes": (b"\0" * 7, "7 bytes are too few"),
    "header 2^63": (b"\0" * 7 + b"\x80" + b"{}", f"a header of {2**63} bytes, but the file is 10"),
    "header longer by one": (b"\3" + b"\0" * 7 + b"{}", "a header of 3 bytes"),
    "no header": (b"\0" * 8 + b"{", "its header, 0 bytes"),
    "not an object": (file_of([1, 2]), "starts with b'\\['"),
    "not JSON": (file_of(b"{]"), "no JSON object"),
    "not UTF-8": (file_of(b'{"\xff":0}'), "no JSON object"),
    "nested": (file_of(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "offsets [5,2]": (file_of({"a": tensor([3], 5, 2)}, b"12345"), "data_offsets"),
    "offsets negative": (file_of({"a": tensor([1], -4, 0)}), "data_offsets"),
    "offsets three": (
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"1"),
        "data_offsets",
    ),
    "offsets true": (file_of({"a": tensor([1], False, True, "U8")}, b"1"), "data_offsets"),
    "offsets past the end": (file_of({"a": tensor([2**40], 0, 2**42)}, b"1234"), "is cut short"),
    "overlap": (
        file_of({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, b"123456789abc"),
        "b at 4:12 overlaps the tensor before it",
    ),
    "shared": (file_of({"a": tensor([1], 0, 4), "b": tensor([1], 0, 4)}, b"1234"), "overlaps"),
    "gap": (
        file_of({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, b"123456789abc"),
        "b at 8:12 leaves a gap before it",
    ),
    "gap in front": (file_of({"a": tensor([1], 4, 8)}, b"12345678"), "leaves a gap"),
    "hidden tail": (file_of({"a": tensor([1], 0, 4)}, b"12345"), "bytes that belong to no tensor"),
    "shape 2^32 x 2^32": (file_of({"a": tensor([2**32, 2**32], 0, 0)}), f"{2**66} bytes"),
    "shape 2^62 x 4": (file_of({"a": tensor([2**62, 4], 0, 0)}), "takes"),
    "shape of 4200 digits": (file_of(DIGITS, b"1234"), "has shape"),
    "shape negative": (file_of({"a": tensor([-1, -1], 0, 4)}, b"1234"), "has shape"),
    "shape fractional": (file_of({"a": tensor([1.0], 0, 4)}, b"1234"), "has shape"),
    "shape of 10^4 axes": (file_of({"a": tensor([1] * 10_000, 0, 4)}, b"1234"), "has shape"),
    "empty but without end": (file_of({"a": tensor([0, 2**62], 0, 0)}), "has shape"),
    "empty, product without end": (file_of({"a": tensor([2**40, 0, 2**40], 0, 0)}), "has shape"),
    "size of another": (file_of({"a": tensor([3], 0, 4)}, b"1234"), "takes 12 bytes"),
    "name twice": (file_of(TWICE, b"1234"), "the key 'a' is there twice"),
    "key twice": (file_of(KEY_TWICE, b"1234"), "the key 'dtype' is there twice"),
    "name of escapes": (file_of({"\x1b[2J": tensor([1], 0, 4)}, b"1234"), "not a tensor's name"),
    "name of half a pair": (file_of({"\ud800": tensor([1], 0, 4)}, b"1234"), "not a tensor's name"),
    "name without end": (file_of({"a" * 9999: tensor([1], 0, 4)}, b"1234"), "not a tensor's name"),
    "dtype XX": (file_of({"a": tensor([1], 0, 4, "XX")}, b"1234"), "a has dtype 'XX'"),
    "dtype FP8": (file_of({"a": tensor([4], 0, 4, "F8_E4M3")}, b"1234"), "'F8_E4M3'"),
    "dtype a list": (file_of({"a": tensor([1], 0, 4, ["F32"])}, b"1234"), "has dtype"),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"), "does not state"),
    "a string": (file_of({"a": "F32"}), "does not state"),
    "metadata a number": (file_of({"__metadata__": {"format": 1}}), "__metadata__"),
    "metadata a list": (file_of({"__metadata__": []}), "__metadata__"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    _refused_cheaply(path, message)


def test_large_file_that_only_pretends(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((90 * MIB).to_bytes(8, "little"))
        file.truncate(1 << 32)
    _refused_cheaply(path, "no safetensors file")
    with path.open("r+b") as file:
        file.write((1 << 31).to_bytes(8, "little") + b"{")
    _refused_cheaply(path, f"at most {100 * MIB} bytes")


def _refused_cheaply(path: Path, message: str) -> None:
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_file(path)
    assert time.process_time() - start < 0.2
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_file(path)
        assert tracemalloc.get_traced_memory()[1] < 50 * MIB
    finally:
        tracemalloc.stop()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
ALMOST = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*CODES, "F8_E5M2"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=64)
    | st.builds(
        lambda length, text, body: length.to_bytes(8, "little") + text + body,
        st.integers(0, 80) | st.integers(0, 2**64 - 1),
        st.binary(max_size=64),
        st.binary(max_size=16),
    )
    | st.builds(file_of, JSON, st.binary(max_size=16))
    | st.builds(file_of, st.dictionaries(st.text(max_size=4), ALMOST | JSON), st.binary())
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_file(path)
    except CheckpointError:
        return
    for found in tensors.values():
        values = found.read()
        assert values.shape == found.shape
        assert dtype_of(values.dtype) is found.dtype


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    write_file(path, [entry("q_proj.weight", draw("q", 6, 4)), entry("norm", draw("n", 5))])
    content = bytearray(path.read_bytes())
    content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        for found in read_file(path).values():
            found.read()
    except CheckpointError:
        return


def test_directory_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_file(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_file(tmp_path / "none.safetensors")


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.FLOAT])
def test_what_we_write_the_library_reads(dtype: DType, tmp_path: Path) -> None:
    values = draw("w", 6, 5, dtype=dtype)
    scalar = draw("s", dtype=dtype)
    path = tmp_path / "model.safetensors"
    write_file(path, [entry("w", values), entry("s", scalar), entry("none", values[:0])])
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        for name, expected in (("w", values), ("s", scalar), ("none", values[:0])):
            found = file.get_tensor(name)
            assert found.shape == expected.shape
            assert found.tobytes() == expected.tobytes()
    found = {name: stored.read() for name, stored in read_file(path).items()}
    assert found["w"].dtype == numpy_dtype(dtype)
    assert found["w"].tobytes() == values.tobytes()
    assert found["s"].shape == ()
    assert found["none"].shape == (0, 5)


def test_what_the_library_writes_we_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    expected = {
        name: draw(name, 7, 3, dtype=dtype)
        for name, dtype in [("a", DType.F32), ("b", DType.F16), ("c", DType.BF16), ("d", DType.I8)]
    }
    save_file(expected, path)
    found = read_file(path)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].read().dtype == values.dtype
        assert found[name].read().tobytes() == values.tobytes()


def test_bf16_bits_reach_torch_and_come_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    bits = np.array([0x0001, 0x8000, 0x7F7F, 0x4792, 0xFF80, 0x7FC1], np.uint16)
    write_file(tmp_path / "ours.safetensors", [entry("w", bits.view(ml_dtypes.bfloat16))])
    theirs = library.load_file(tmp_path / "ours.safetensors")
    assert theirs["w"].dtype == torch.bfloat16
    assert theirs["w"].view(torch.uint16).numpy().tolist() == bits.tolist()
    library.save_file(theirs, tmp_path / "theirs.safetensors")
    found = read_file(tmp_path / "theirs.safetensors")["w"].read()
    assert found.view(np.uint16).tolist() == bits.tolist()


def test_names_that_share_storage_are_written_apart(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    weight = torch.arange(12.0).reshape(4, 3)
    module = {"embed_tokens.weight": weight, "lm_head.weight": weight}
    with pytest.raises(RuntimeError, match="share memory"):
        library.save_file(module, tmp_path / "theirs.safetensors")
    module["turned"] = weight.T
    path = tmp_path / "model.safetensors"
    write_file(path, [entry(name, values.numpy()) for name, values in module.items()])
    found = library.load_file(path)
    assert all(torch.equal(found[name], values) for name, values in module.items())


def test_values_are_views_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, [entry("w", draw("w", 4, 4))])
    values = read_file(path)["w"].read()
    assert isinstance(values, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0] = 1


def test_more_tensors_than_files_may_be_open(tmp_path: Path, few_files: None) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, [entry(f"w{i}", draw(f"w{i}", 4)) for i in range(64)])
    held = {name: stored.read() for name, stored in read_file(path).items()}
    for name, values in held.items():
        assert values.tobytes() == draw(name, 4).tobytes()


def test_a_file_is_let_go_with_its_last_tensor(tmp_path: Path) -> None:
    fds = Path("/proc/self/fd")
    if not fds.exists():
        pytest.skip("no /proc")
    path = tmp_path / "model.safetensors"
    write_file(path, [entry("a", draw("a", 4)), entry("b", draw("b", 4))])

    def times_open() -> int:
        return sum(os.path.realpath(fd) == str(path.resolve()) for fd in fds.iterdir())

    tensors = read_file(path)
    assert times_open() == 0
    a, b = tensors["a"].read(), tensors["b"].read()
    assert times_open() == 1
    part = np.asarray(a)[1:2]
    del a, b
    assert times_open() == 1
    assert part.tolist() == draw("a", 4)[1:2].tolist()
    del part
    assert times_open() == 0


def test_tensors_are_aligned_whatever_the_file_does(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {"a": tensor([3], 0, 3, "U8"), "b": tensor([2], 3, 11)}
    path.write_bytes(file_of(header, b"123" + np.array([1, 2], np.float32).tobytes()))
    values = read_file(path)["b"].read()
    assert values.flags.aligned
    assert values.tolist() == [1, 2]

    write_file(path, [entry("a", np.zeros(3, np.uint8)), entry("b", values)])
    values = read_file(path)["b"].read()
    assert values.ctypes.data % 4 == 0
    assert values.base is not None, "a view of the map: nothing had to be copied"


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, [entry("w", draw("w", 4))])
    stored = read_file(path)["w"]
    held = stored.read()
    write_file(path, [entry("w", draw("another", 4))])  # as many bytes as before
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        stored.read()
    assert held.tobytes() == draw("w", 4).tobytes()
    assert read_file(path)["w"].read().tobytes() == draw("another", 4).tobytes()
    stored = read_file(path)["w"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"\d+ bytes then, \d+ now"):
        stored.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        stored.read()


def failing() -> Array:
    raise CheckpointError("the disk it lay on is gone")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, [entry("w", draw("w", 4))])
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="is gone"):
        write_file(path, [entry("w", draw("v", 4)), Entry("x", DType.F32, (4,), failing)])
    assert [path] == list(tmp_path.iterdir())
    assert path.read_bytes() == before


def test_a_failed_sharded_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is gone"):
        write_sharded(
            tmp_path,
            [entry("w", draw("w", 4)), Entry("x", DType.F32, (4,), failing)],
            max_shard_bytes=16,
        )
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time
from pathlib import Path
import numpy as np
from linnet.spec.types import DType
from linnet.weights.safetensors import Entry, write_sharded

def hang():
    print("midway", flush=True)
    time.sleep(60)

tensors = [
    Entry("a", DType.F32, (1 << 16,), lambda: np.ones(1 << 16, np.float32)),
    Entry("b", DType.F32, (4,), hang),
]
write_sharded(Path(sys.argv[1]), tensors, max_shard_bytes=int(sys.argv[2]))
"""


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 16])
def test_a_killed_writer_leaves_no_weights(max_shard_bytes: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(max_shard_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == "midway\n"
        assert list(tmp_path.iterdir()), "it had begun"
        writer.kill()
    for pattern in ("*.safetensors", "*.json"):
        assert not list(tmp_path.glob(pattern))
    # What is left does not stand in the way of the next.
    write_sharded(tmp_path, [entry("a", draw("a", 4))])
    assert read_file(tmp_path / "model.safetensors")["a"].read().tobytes() == draw("a", 4).tobytes()


def test_old_and_new_shards_never_pass_for_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sharded(tmp_path, [entry("a", draw("a", 4)), entry("b", draw("b", 4))], max_shard_bytes=1)
    replace = Path.replace

    def fail_at_the_first_shard(self: Path, target: Path) -> Path:
        if target.name.startswith("model-00001"):
            raise OSError(5, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_at_the_first_shard)
    new = [entry("a", draw("c", 4)), entry("b", draw("d", 4))]
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_sharded(tmp_path, new, max_shard_bytes=1)
    assert [path.name for path in tmp_path.glob("*.json")] == []


def test_writing_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="w would be written twice"):
        write_file(path, [entry("w", draw("w", 4)), entry("w", draw("w", 4))])
    with pytest.raises(CheckpointError, match="w would be written twice"):
        write_sharded(tmp_path, [entry("w", draw("w", 4))] * 2, max_shard_bytes=1)
    wrong = Entry("w", DType.BF16, (4,), lambda: draw("w", 4))
    with pytest.raises(CheckpointError, match=r"announced as bf16\[4\] but is float32\[4\]"):
        write_file(path, [wrong])
    wrong = Entry("w", DType.BF16, (4,), lambda: draw("w", 4), DType.F16)
    with pytest.raises(CheckpointError, match=r"announced as f16\[4\] but is float32\[4\]"):
        write_file(path, [wrong])
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        write_file(tmp_path / "none" / "x.safetensors", [])
    assert not list(tmp_path.iterdir())


def test_written_permissions_follow_the_umask(tmp_path: Path) -> None:
    write_file(tmp_path / "ours", [])
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_shards_are_named_as_transformers_names_them(tmp_path: Path) -> None:
    tensors = [entry(f"w{i}", draw(f"w{i}", size)) for i, size in enumerate((2, 2, 9, 1))]
    written = write_sharded(tmp_path, tensors, max_shard_bytes=16)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [path.name for path in written] == [*names, "model.safetensors.index.json"]
    assert sorted(written) == sorted(tmp_path.iterdir())
    index = json.loads(written[-1].read_text())
    assert index["metadata"]["total_size"] == 14 * 4
    places = {"w0": names[0], "w1": names[0], "w2": names[1], "w3": names[2]}
    assert index["weight_map"] == places
    for name, shard in places.items():
        found = read_file(tmp_path / shard)[name].read()
        assert found.tobytes() == draw(name, *found.shape).tobytes()


def test_a_small_model_is_one_file_without_index(tmp_path: Path) -> None:
    written = write_sharded(tmp_path, [entry("w", draw("w", 4))], metadata={})
    assert [path.name for path in written] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == list(written)
    with safe_open(written[0], framework="np") as file:
        assert not file.metadata()


def test_shards_are_never_written_beside_other_weights(tmp_path: Path) -> None:
    tensors = [entry("a", draw("a", 4)), entry("b", draw("b", 4))]
    write_sharded(tmp_path, tensors, max_shard_bytes=16)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="choose an empty folder"):
        write_sharded(tmp_path, tensors)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_is_rewritten_in_place_from_its_own_tensors(tmp_path: Path) -> None:
    tensors = [entry("a", draw("a", 4)), entry("b", draw("b", 4))]
    shards = write_sharded(tmp_path, tensors, max_shard_bytes=16)[:2]
    stored = [stored for path in shards for stored in read_file(path).values()]
    write_sharded(tmp_path, entries_of(stored[::-1]), max_shard_bytes=16)
    assert read_file(shards[0])["b"].read().tobytes() == draw("b", 4).tobytes()
    assert read_file(shards[1])["a"].read().tobytes() == draw("a", 4).tobytes()


def test_more_shards_than_files_may_be_open(tmp_path: Path, few_files: None) -> None:
    tensors = [entry(f"w{i}", draw("w", 4)) for i in range(32)]
    written = write_sharded(tmp_path, tensors, max_shard_bytes=16)
    assert len(written) == 33
    assert {*tmp_path.iterdir()} == {*written}


def test_writing_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    rows = MIB // 2

    def make(i: int) -> Array:
        return np.full((rows, 4), i, np.float32)  # 8 MiB

    tensors = [
        Entry(f"w{i}", DType.F32, (rows, 4), lambda i=i: make(i))  # type: ignore[misc]
        for i in range(6)
    ]
    tracemalloc.start()
    try:
        shards = write_sharded(tmp_path, tensors, max_shard_bytes=20 * MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * MIB
    assert read_file(shards[-2])["w5"].read()[-1, -1] == 5

"""Which memory is new, and that huge pages hold what small ones did."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet_onnx import pages
from linnet_onnx.pages import HUGE, added, anonymous_memory, use_huge_pages

ADDRESSES = 40


def ranges(places: frozenset[int]) -> list[tuple[int, int]]:
    """What runs of neighbouring addresses there are."""
    edges = [n for n in range(ADDRESSES + 1) if (n in places) != (n - 1 in places)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def places(found: list[tuple[int, int]]) -> list[int]:
    return [n for start, end in found for n in range(start, end)]


@given(*[st.frozensets(st.integers(0, ADDRESSES - 1))] * 2)
def test_what_is_added(after: frozenset[int], before: frozenset[int]) -> None:
    found = added(ranges(after), ranges(before))
    assert all(start < end for start, end in found)
    assert places(found) == sorted(after - before)


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which memory there is")


@linux
def test_huge_pages_hold_what_small_ones_did() -> None:
    """In maps of their own: a heap may give arrays what it had before."""
    before = anonymous_memory()
    rng = np.random.default_rng(0)
    arrays = [np.frombuffer(anonymous_map(1_600_004), np.int32) for _ in range(40)]
    for array in arrays:
        array[:] = rng.integers(0, 2**30, array.size, np.int32)
    sums = [int(array.sum()) for array in arrays]
    fresh = added(anonymous_memory(), before)
    assert sum(end - start for start, end in fresh) >= sum(array.nbytes for array in arrays) // 2
    small = huge_bytes()
    granted = use_huge_pages(fresh)
    if not granted:
        pytest.skip("this system gives no huge pages when they are asked for")
    assert granted % HUGE == 0
    assert huge_bytes() > small
    assert [int(array.sum()) for array in arrays] == sums


@linux
def test_a_hole_keeps_no_other_page_small() -> None:
    """Of 16 huge pages' memory the sixth was never touched."""
    memory = anonymous_map(18 * HUGE)
    array = np.frombuffer(memory, np.uint8)
    start = array.ctypes.data
    first = -(-start // HUGE) * HUGE
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # so that touching gives small pages
    for page in range(16):
        if page != 5:
            array[first - start + page * HUGE :][:HUGE:4096] = page
    memory.madvise(mmap.MADV_HUGEPAGE)
    granted = use_huge_pages([(first, first + 16 * HUGE)])
    if not granted:
        pytest.skip("this system gives no huge pages when they are asked for")
    assert granted == 15 * HUGE
    assert [array[first - start + page * HUGE] for page in range(16) if page != 5] == [
        page for page in range(16) if page != 5
    ]


def anonymous_map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


@linux
@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_system_that_does_not_say_gives_none(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bytes:
        raise error

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert anonymous_memory() == []


@linux
def test_files_of_any_name_may_be_mapped(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/mod\xff"
    with Path(os.fsdecode(path)).open("wb+") as file:
        file.write(b"x" * 4096)
        file.flush()
        with mmap.mmap(file.fileno(), 4096):
            assert anonymous_memory()


@linux
def test_pages_that_are_turned_off_stay_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(pages, "SETTING", setting)
    assert use_huge_pages(anonymous_memory()) == 0


SESSION = """
from linnet.models.llama import Llama
from linnet.plugins.interfaces import LoadOptions
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet_onnx.backend import OnnxBackend

model = Llama().bind(random_checkpoint(f0_config(vocab_size=300_007), seed=0))
options = LoadOptions(dtype="f32", max_seq=48, threads=2)
print(*OnnxBackend().load(model, options).granted.notes, sep="\\n")
"""


@linux
def test_a_session_says_how_much_it_has() -> None:
    """The head of 55 MiB is packed, more than a new process's heap keeps of what was freed."""
    done = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, check=True
    )
    said = [note for note in done.stdout.splitlines() if note.endswith(" MiB in huge pages")]
    if not said:
        pytest.skip("this system gives no huge pages when they are asked for")
    assert 16 <= int(said[0].split()[1]) <= 256

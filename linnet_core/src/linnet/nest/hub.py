"""Files that come from the Hugging Face Hub, kept in the Hub's own cache.

The Hub is asked for a sign of life before anything is fetched, so that a machine without a way
to it waits seconds and not minutes. HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN and the proxy
variables mean what they mean to ``huggingface_hub``.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from linnet.errors import SourceError
from linnet.nest.card import HubSource

PATTERNS = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
"""What is fetched of a repository: never .bin, which would need pickle, nor a subfolder, which
holds other formats and earlier steps."""
PATIENCE = 2.5
"""Seconds the Hub has to give a sign of life."""


def cached(source: HubSource) -> Path | None:
    """The snapshot in the Hub's cache, if all that a run needs is there."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{source.repo.replace('/', '--')}"
    revision = source.revision or "main"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    return folder if _complete(folder) else None


def fetch(source: HubSource, report: Callable[[str], None]) -> Path:
    """Bring the snapshot into the Hub's cache. Raises SourceError."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise SourceError("HF_HUB_OFFLINE is set")
    _check_reachable(constants.ENDPOINT)

    from huggingface_hub import snapshot_download

    report(f"downloading {source} from {constants.ENDPOINT}")
    try:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=list(PATTERNS),
            ignore_patterns=["*/*"],
            endpoint=constants.ENDPOINT,
            cache_dir=constants.HF_HUB_CACHE,
        )
    except Exception as error:  # the library lets its HTTP client's errors through, and OSError
        raise SourceError(_explain(source, error)) from error
    if not _complete(Path(folder)):
        raise SourceError(f"{folder} lacks config.json, a tokenizer or safetensors weights")
    return Path(folder)


def verify(folder: Path) -> list[str]:
    """Hash a snapshot's files again; the names of those the cache keeps no hash for.

    The cache names each file by the SHA-256 or the Git hash the Hub gave for it. Raises
    SourceError, naming every file whose content has another.
    """
    unknown, wrong = [], []
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        stated, name = path.resolve().name, path.relative_to(folder).as_posix()
        if re.fullmatch("[0-9a-f]{64}", stated):
            digest = hashlib.sha256()
        elif re.fullmatch("[0-9a-f]{40}", stated):
            digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        else:
            unknown.append(name)
            continue
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != stated:
            wrong.append(f"{name} has hash {digest.hexdigest()} instead of {stated}")
    if wrong:
        raise SourceError(f"{folder}: {'; '.join(wrong)}; remove these files and fetch again")
    return unknown


def _complete(folder: Path) -> bool:
    """Whether a run has what it needs: an interrupted download leaves a folder, too."""
    if not (folder / "config.json").exists():
        return False
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return False
    if (folder / "model.safetensors").exists():
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return all((folder / name).exists() for name in set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _check_reachable(endpoint: str) -> None:
    """Raise SourceError unless the Hub answers in time.

    It is asked from a thread: looking up a host has no timeout of its own.
    """
    outcome: list[str] = []

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            status = get_session().head(endpoint, timeout=PATIENCE).status_code
            outcome.append(f"it answers with status {status}" if status >= 500 else "")
        except Exception as error:  # whatever its HTTP client raises
            outcome.append(_first_line(error))

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    why = outcome[0] if outcome else f"no answer within {PATIENCE} seconds"
    if why:
        raise SourceError(f"{endpoint} cannot be reached: {why}")


def _explain(source: HubSource, error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            f"{source.repo} is gated: accept its licence at https://huggingface.co/{source.repo}, "
            "then `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hub has no repository {source.repo}, or it is private: `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{source.repo} has no revision {source.revision}"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Files that strangers name, and files that are whole or not there.

Knows nothing of what is in them.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from linnet.errors import CheckpointError


def inside(folder: Path, name: str) -> Path:
    """``folder / name`` if that is a plain name of a file whose real path stays in the folder.

    A Hub cache's snapshot links to blobs beside it; those belong to the model. Raises
    CheckpointError otherwise: a model from a stranger names no file of ours.
    """
    plain = name.isprintable() and len(name.encode("utf-8", "replace")) < 256
    if not plain or name in ("", ".", "..") or any(mark in name for mark in "/\\:"):
        raise CheckpointError(f"{folder}: {name[:256]!r} is not a plain file name")
    path = folder / name
    try:
        real, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):  # Python before 3.13 says RuntimeError to a loop of links
        raise CheckpointError(f"{path} is a link that leads nowhere") from None
    roots = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{path} leads to {real}, which is outside the model's folder; if you trust it, put "
            "the file itself there"
        )
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; was the model fetched whole?")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file")
    return path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises CheckpointError, which names the file, for what the system says of reading it."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where}: cannot be read: {error.strerror or error}") from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends, or vanishes if it fails.

    The block may ``settle`` the file itself; who writes many at once must, since each is open.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            yield file
            settle(file)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``folder`` when the block ends, or vanishes if it fails.

    Raises CheckpointError for a folder that is there and not empty: what it holds is not ours.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise CheckpointError(f"{folder} exists and is not an empty folder; name another")
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        yield beside
        for path in beside.rglob("*"):
            _sync(path)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}"
        ) from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Wait until a file's bytes are on the disk: a name must not be there before them."""
    if path.is_file():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def settle(file: BinaryIO) -> None:
    """Close a file once its bytes are on the disk."""
    if not file.closed:
        file.flush()
        os.fsync(file.fileno())
        file.close()

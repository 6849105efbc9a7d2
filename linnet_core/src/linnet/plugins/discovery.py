"""Finding plugins from metadata, and importing their entry modules one by one.

Three steps, each with a type of its own: a ``FoundPlugin`` is what an installed distribution says,
a ``LoadedPlugin`` has been imported, a ``RegisteredPlugin`` (``linnet.plugins.registration``) has
been asked what it offers. A plugin that fails a step becomes a ``BrokenPlugin``, and the others go
on. Nothing here knows what hooks there are.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from linnet.plugins.descriptors import Descriptor

GROUP = "linnet"
DISABLED = "LINNET_DISABLE_PLUGINS"
"""The environment variable that names plugins to leave alone, separated by commas."""
UNKNOWN = "unknown distribution"
LONGEST = 500
"""Characters of a plugin's own message that one line repeats."""


class Stage(StrEnum):
    """How far a broken plugin came."""

    FIND = "find"
    """Its distribution's metadata cannot be read."""
    LOAD = "load"
    """Its entry module cannot be imported."""
    REGISTER = "register"
    """Its hooks are not Linnet's, or one of them raised."""
    CHECK = "check"
    """What a hook returned is not valid, or was written for another API version."""
    COLLISION = "collision"
    """It claims a name that another plugin claims as well."""


@dataclass(frozen=True)
class FoundPlugin:
    """An entry point of the group ``linnet``; nothing was imported."""

    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version})"

    @property
    def builtin(self) -> bool:
        """Whether it comes with Linnet itself."""
        return self.distribution == "linnet"


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin whose entry module (or object) was imported."""

    found: FoundPlugin
    module: Any


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that is not used, and why. ``offers`` is what it is known to have offered."""

    found: FoundPlugin
    stage: Stage
    error: BaseException = field(compare=False)
    offers: tuple[Descriptor, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.found} is not used: {one_line(self.error)} "
            f"(see: linnet plugins doctor {self.found.name})"
        )


def one_line(error: BaseException) -> str:
    """An error's type and message on one line, whatever the message holds."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # its own __str__ is broken as well
        message = ""
    if len(message) > LONGEST:
        message = message[:LONGEST] + "..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def find_plugins() -> tuple[list[FoundPlugin], list[BrokenPlugin]]:
    """Every plugin of every installed distribution, by metadata alone, sorted by name.

    A distribution that is installed twice counts where Python would find it first.
    """
    found: list[FoundPlugin] = []
    broken: list[BrokenPlugin] = []
    seen: set[str] = set()
    for distribution in _plugin_distributions():
        name, version = _identity(distribution)
        if name in seen and name != UNKNOWN:
            continue
        seen.add(name)
        try:
            entries = distribution.entry_points.select(group=GROUP)
            found += [FoundPlugin(entry.name, entry.value, name, version) for entry in entries]
        except Exception as error:
            unreadable = FoundPlugin(name, "", name, version)
            broken.append(BrokenPlugin(unreadable, Stage.FIND, error))
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution)), broken


def load_plugin(found: FoundPlugin) -> LoadedPlugin | BrokenPlugin:
    """Import a plugin's entry module.

    Whatever goes wrong is its own affair, even a ``sys.exit()``; only an interrupt passes.
    """
    try:
        return LoadedPlugin(found, EntryPoint(found.name, found.value, GROUP).load())
    except (Exception, SystemExit) as error:
        return BrokenPlugin(found, Stage.LOAD, error)


def disabled_names() -> frozenset[str]:
    """The plugins that the environment says to leave alone."""
    names = os.environ.get(DISABLED, "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def _plugin_distributions() -> Iterator[Distribution]:
    # Not importlib.metadata.entry_points(): it parses every distribution's entry points at once,
    # so that one malformed file, of whatever project, would cost all plugins.
    for distribution in distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except UnicodeDecodeError:
            continue  # not a file that an installer wrote, and so no plugin's
        if text and f"[{GROUP}]" in text:
            yield distribution


def _identity(distribution: Distribution) -> tuple[str, str]:
    try:
        # Older Pythons give None where METADATA is missing, newer ones raise.
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    except Exception:
        name = version = ""
    return name or UNKNOWN, version or "of unknown version"

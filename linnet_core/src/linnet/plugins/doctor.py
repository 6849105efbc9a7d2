"""A closer look at plugins: import what they describe, and ask backends what is there.

Listing plugins imports nothing heavy; this imports everything, on request.
"""

import inspect
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from linnet.errors import PluginError
from linnet.plugins.descriptors import Backend, Descriptor, Exporter, Family, Format
from linnet.plugins.discovery import DISABLED, FoundPlugin, one_line
from linnet.plugins.interfaces import (
    BackendInterface,
    BenchMethodInterface,
    ExporterInterface,
    FamilyInterface,
    FormatInterface,
    Probe,
)
from linnet.plugins.manager import OFFICIAL, PluginManager, missing_requirement
from linnet.plugins.registration import KINDS


class Health(StrEnum):
    """What was found out about a plugin or about one thing that it offers."""

    OK = "ok"
    UNAVAILABLE = "unavailable"
    """It works, and says that it cannot run on this machine."""
    NOT_INSTALLED = "not installed"
    """A module that it requires is missing."""
    DISABLED = "disabled"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; ``traceback`` where something raised."""

    plugin: FoundPlugin
    subject: str
    health: Health
    detail: str = ""
    traceback: str = ""


def examine(manager: PluginManager, name: str | None = None) -> list[Finding]:
    """Examine every plugin, or those of one name or one distribution.

    Raises PluginError when ``name`` is neither.
    """
    findings = list(_findings(manager, name))
    if name is not None and not findings:
        if name in OFFICIAL:
            raise PluginError(f'plugin {name!r} is not installed: pip install "linnet[{name}]"')
        installed = [found.name for found in _all_found(manager)]
        close = get_close_matches(name, [*installed, *OFFICIAL], n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"installed: {', '.join(installed)}"
        raise PluginError(f"no plugin or distribution is named {name!r}: {hint}")
    return findings


def _findings(manager: PluginManager, name: str | None) -> Iterator[Finding]:
    def asked(found: FoundPlugin) -> bool:
        return name in (None, found.name, found.distribution)

    for plugin in manager.plugins:
        if asked(plugin.found):
            for descriptor in plugin.offers:
                yield _examine(manager, plugin.found, descriptor)
            if not plugin.offers:
                yield Finding(plugin.found, "plugin", Health.OK, "offers nothing here")
    for disabled in manager.disabled:
        if asked(disabled):
            yield Finding(disabled, "plugin", Health.DISABLED, f"{DISABLED} names it")
    for broken in manager.broken:
        if asked(broken.found):
            yield _failure(broken.found, f"plugin, at stage {broken.stage}", broken.error)


def _all_found(manager: PluginManager) -> list[FoundPlugin]:
    used = [plugin.found for plugin in manager.plugins]
    return [*used, *manager.disabled, *(broken.found for broken in manager.broken)]


def _examine(manager: PluginManager, found: FoundPlugin, descriptor: Descriptor) -> Finding:
    subject = f"{KINDS[type(descriptor)]} {descriptor.name!r}"
    try:
        implementation = manager.implementation(descriptor)
        _check_interface(subject, descriptor, implementation)
        probe = implementation.probe() if isinstance(descriptor, Backend) else Probe(True, "")
        if not isinstance(probe, Probe):
            raise PluginError(f"{subject}: probe() returned {probe!r}, not a Probe")
    except (Exception, SystemExit) as error:
        cause = error.__cause__ if isinstance(error, PluginError) else None
        if missing_requirement(descriptor, cause or error):
            return Finding(found, subject, Health.NOT_INSTALLED, str(error))
        return _failure(found, subject, cause or error)
    health = Health.OK if probe.available else Health.UNAVAILABLE
    return Finding(found, subject, health, probe.detail)


def _failure(found: FoundPlugin, subject: str, error: BaseException) -> Finding:
    trace = "".join(traceback.format_exception(error))
    return Finding(found, subject, Health.BROKEN, one_line(error), trace)


def _check_interface(subject: str, descriptor: Descriptor, implementation: Any) -> None:
    """Every method of the interface is there and takes the arguments it will be called with."""
    interface = _interface(descriptor)
    for name, wanted in inspect.getmembers(interface, inspect.isfunction):
        if name.startswith("_"):
            continue
        method = getattr(implementation, name, None)
        if not callable(method):
            raise PluginError(f"{subject}: {descriptor.target} has no method {name}()")
        signature = inspect.signature(wanted)
        names = list(signature.parameters)[1:]
        try:
            inspect.signature(method).bind(*names)
        except TypeError as error:
            raise PluginError(
                f"{subject}: {descriptor.target} has {name}{inspect.signature(method)}, which "
                f"cannot be called as {name}({', '.join(names)}): {error}"
            ) from None


def _interface(descriptor: Descriptor) -> type:
    if isinstance(descriptor, Family):
        return FamilyInterface
    if isinstance(descriptor, Format):
        return FormatInterface
    if isinstance(descriptor, Backend):
        return BackendInterface
    return ExporterInterface if isinstance(descriptor, Exporter) else BenchMethodInterface

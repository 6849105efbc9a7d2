"""Asking a loaded plugin what it offers, and checking every answer.

Each plugin is registered with a pluggy manager of its own: what fails half-way leaves nothing
behind, and no plugin can wrap or reorder another's hooks.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import pluggy

from linnet.errors import PluginError
from linnet.plugins import hookspecs
from linnet.plugins.descriptors import (
    API_VERSION,
    Backend,
    BenchMethod,
    Capability,
    Descriptor,
    Exporter,
    Family,
    Format,
)
from linnet.plugins.discovery import BrokenPlugin, FoundPlugin, LoadedPlugin, Stage

HOOKS: dict[str, type[Descriptor]] = {
    "linnet_register_models": Family,
    "linnet_register_formats": Format,
    "linnet_register_backends": Backend,
    "linnet_register_exporters": Exporter,
    "linnet_register_bench_methods": BenchMethod,
}
KINDS: dict[type[Descriptor], str] = {
    Family: "family",
    Format: "format",
    Backend: "backend",
    Exporter: "exporter",
    BenchMethod: "bench method",
}
"""What each kind of descriptor is called in messages."""

RUN_DTYPES = frozenset({"f64", "f32", "f16", "bf16", "int8", "int4"})
"""The float types of ``linnet.spec.types``, which costs too much to import for a list of them, and
the encodings of weights that are decoded in f32."""
_NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_TARGET = re.compile(f"{_DOTTED}:{_DOTTED}")
_RESERVED = frozenset({"load"})
"""Attributes of the package ``linnet`` that are no modules."""


@dataclass(frozen=True)
class RegisteredPlugin:
    """A plugin whose every descriptor was found valid."""

    found: FoundPlugin
    offers: tuple[Descriptor, ...]


def register_plugin(loaded: LoadedPlugin) -> RegisteredPlugin | BrokenPlugin:
    """Call a plugin's hooks and check what they return; all of it is good, or none is used."""
    offers: list[Descriptor] = []
    stage = Stage.REGISTER
    try:
        for hook, answer in _answers(loaded):
            stage = Stage.CHECK
            for descriptor in _checked_answer(hook, answer):
                offers.append(descriptor)
                check_descriptor(descriptor)
            stage = Stage.REGISTER
        stage = Stage.CHECK
        _check_distinct(offers)
    except (Exception, SystemExit) as error:
        return BrokenPlugin(loaded.found, stage, error, tuple(offers))
    return RegisteredPlugin(loaded.found, tuple(offers))


def claims(descriptor: Descriptor) -> Iterator[tuple[str, str]]:
    """The names that a descriptor wants for itself, each with the kind of name that it is."""
    yield KINDS[type(descriptor)], descriptor.name
    if isinstance(descriptor, Family):
        for model_type in descriptor.model_types:
            yield "model_type", model_type


def check_descriptor(descriptor: Descriptor) -> None:
    """Raise PluginError for a descriptor that Linnet could not use, saying what is wrong."""
    what = f"{KINDS[type(descriptor)]} {descriptor.name!r}"
    if descriptor.api_version != API_VERSION:
        older = isinstance(descriptor.api_version, int) and descriptor.api_version < API_VERSION
        raise PluginError(
            f"{what} was written for plugin API {descriptor.api_version!r}, and this Linnet has "
            f"{API_VERSION}: upgrade {'the plugin' if older else 'linnet'}"
        )
    _check_types(what, descriptor)
    if not _NAME.fullmatch(descriptor.name):
        raise PluginError(
            f"{what} is not a good name: use a-z and 0-9, joined by single '-', '_' or '.'"
        )
    if not _TARGET.fullmatch(descriptor.target):
        raise PluginError(f"{what} has target {descriptor.target!r}, not 'package.module:name'")
    match descriptor:
        case Family():
            _require(what, "model_types", descriptor.model_types)
        case Format():
            _require(what, "suffixes or markers", descriptor.suffixes + descriptor.markers)
            for suffix in descriptor.suffixes:
                if not re.fullmatch(r"\.[^/]+", suffix):
                    raise PluginError(f"{what} has suffix {suffix!r}, which is not '.something'")
        case Backend():
            for name in ("modes", "devices", "dtypes", "capabilities"):
                _require(what, name, getattr(descriptor, name))
            unknown = set(descriptor.dtypes) - RUN_DTYPES
            if unknown:
                raise PluginError(
                    f"{what} has dtypes {', '.join(sorted(unknown))}, "
                    f"which are not among {', '.join(sorted(RUN_DTYPES))}"
                )
        case Exporter():
            _require(what, "dtypes", descriptor.dtypes)
            _check_reachable(what, descriptor.name)
        case BenchMethod():
            _require(what, "dtypes", descriptor.dtypes)
            if descriptor.environment and not _NAME.fullmatch(descriptor.environment):
                raise PluginError(f"{what} has environment {descriptor.environment!r}, not a name")
            if bool(descriptor.environment) != bool(descriptor.packages):
                raise PluginError(f"{what} needs both environment and packages, or neither")
            if descriptor.without and not descriptor.environment:
                raise PluginError(f"{what} has without, and no environment")


def _answers(loaded: LoadedPlugin) -> Iterator[tuple[str, Any]]:
    """Each hook that the plugin implements, with what it returned."""
    manager = pluggy.PluginManager("linnet")
    manager.add_hookspecs(hookspecs)
    _check_marked(loaded.module)
    try:
        manager.register(loaded.module, loaded.found.name)
    except pluggy.PluginValidationError as error:
        raise PluginError(_explain(loaded.module) or " ".join(str(error).split())) from error
    callers = manager.get_hookcallers(loaded.module) or []
    if not callers:
        raise PluginError(f"{loaded.found.value} implements none of: {', '.join(HOOKS)}")
    for caller in callers:
        implementations = caller.get_hookimpls()
        if not caller.has_spec() and not all(each.optionalhook for each in implementations):
            raise PluginError(_unknown_hook(caller.name))
        if any(each.wrapper or each.hookwrapper for each in implementations):
            raise PluginError(f"{caller.name} is a wrapper; it must return a list of descriptors")
    for caller in callers:
        if caller.name in HOOKS:
            answers = caller()
            if len(answers) < len(caller.get_hookimpls()):
                answers.append(None)  # pluggy drops None: say that it was returned
            for answer in answers:
                yield caller.name, answer


def _check_marked(module: Any) -> None:
    """A hook whose author forgot ``@hookimpl`` would be passed over in silence."""
    for name, function in _own_functions(module):
        if name.startswith("linnet_") and not hasattr(function, "linnet_impl"):
            if name not in HOOKS:
                raise PluginError(_unknown_hook(name))
            raise PluginError(f"{name} is not marked: write @hookimpl above it")


def _explain(module: Any) -> str | None:
    """What pluggy means, in words about this one kind of hook: it takes no arguments."""
    for name, function in _own_functions(module):
        if name in HOOKS:
            try:
                inspect.signature(function).bind()
            except TypeError:
                return f"{name} takes no arguments, but is {name}{inspect.signature(function)}"
    return None


def _own_functions(module: Any) -> list[tuple[str, Callable[..., Any]]]:
    return inspect.getmembers(module, inspect.isroutine)


def _unknown_hook(name: str) -> str:
    close = get_close_matches(name, HOOKS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the hooks are {', '.join(HOOKS)}"
    return f"there is no hook {name}: {hint}"


def _checked_answer(hook: str, answer: Any) -> list[Descriptor]:
    kind = HOOKS[hook]
    if not isinstance(answer, list | tuple):
        raise PluginError(f"{hook} returned {type(answer).__name__}, not a list of {kind.__name__}")
    for item in answer:
        if type(item) is not kind:
            raise PluginError(f"{hook} returned {item!r} in its list, not a {kind.__name__}")
    return list(answer)


def _check_distinct(offers: list[Descriptor]) -> None:
    seen: set[tuple[str, str]] = set()
    for descriptor in offers:
        for claim in claims(descriptor):
            if claim in seen:
                raise PluginError(f"{claim[0]} {claim[1]!r} is offered twice by this plugin")
            seen.add(claim)


def _check_types(what: str, descriptor: Descriptor) -> None:
    for item in fields(descriptor):
        value = getattr(descriptor, item.name)
        if item.type in (str, int, bool):
            good = type(value) is item.type
        elif item.type == frozenset[Capability]:
            good = isinstance(value, frozenset) and all(isinstance(v, Capability) for v in value)
        else:  # tuple[str, ...]
            good = isinstance(value, tuple) and all(isinstance(v, str) and v for v in value)
        if not good:
            wanted = item.type.__name__ if item.type in (str, int, bool) else item.type
            raise PluginError(f"{what} has {item.name} {value!r}, which is not {wanted}")


def _require(what: str, name: str, value: object) -> None:
    if not value:
        raise PluginError(f"{what} has no {name}")


def _check_reachable(what: str, name: str) -> None:
    """An exporter is also ``linnet.NAME``, so NAME must be free and must be an identifier."""
    if not name.isidentifier():
        raise PluginError(f"{what} cannot be reached as linnet.{name}: use an identifier")
    if name in _RESERVED or find_spec(f"linnet.{name}"):
        raise PluginError(f"{what} cannot be reached as linnet.{name}, which is Linnet's own")

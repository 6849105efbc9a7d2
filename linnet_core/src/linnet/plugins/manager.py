"""The plugins of this process: what they offer, and what became of those that do not work.

A plugin is used whole or not at all. Which one is found first never matters: a name that two
plugins claim belongs to neither, except that nobody takes a name of Linnet's own. Asking for
something that a broken plugin would have given raises that plugin's own error.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any, TypeVar

from linnet.errors import PluginError
from linnet.plugins.descriptors import (
    Backend,
    BenchMethod,
    Descriptor,
    Exporter,
    Family,
    Format,
)
from linnet.plugins.discovery import (
    DISABLED,
    BrokenPlugin,
    FoundPlugin,
    Stage,
    disabled_names,
    find_plugins,
    load_plugin,
    one_line,
)
from linnet.plugins.registration import KINDS, RegisteredPlugin, claims, register_plugin

D = TypeVar("D", Family, Format, Backend, Exporter, BenchMethod)

OFFICIAL: Mapping[str, tuple[tuple[type[Descriptor], str], ...]] = {
    "torch": ((Backend, "torch"),),
    "jax": ((Backend, "jax"), (Exporter, "stablehlo")),
    "onnx": ((Backend, "onnx"), (Exporter, "onnx")),
    "gguf": ((Format, "gguf"), (Exporter, "gguf")),
    "hf": ((Backend, "transformers"), (Exporter, "hf")),
}
"""Linnet's own plugins that are installed apart: the extra, which is the plugin's name as well,
and what it offers. It is here so that asking for one says what to install."""


class PluginManager:
    """Every plugin that was found, by state, and every descriptor by kind and name."""

    def __init__(
        self,
        plugins: Iterable[RegisteredPlugin],
        broken: Iterable[BrokenPlugin] = (),
        disabled: Iterable[FoundPlugin] = (),
    ) -> None:
        good, collided = _settle_claims(list(plugins))
        self.plugins: tuple[RegisteredPlugin, ...] = tuple(good)
        self.broken: tuple[BrokenPlugin, ...] = (*broken, *collided)
        self.disabled: tuple[FoundPlugin, ...] = tuple(disabled)
        self.families: Mapping[str, Family] = self._table(Family)
        self.formats: Mapping[str, Format] = self._table(Format)
        self.backends: Mapping[str, Backend] = self._table(Backend)
        self.exporters: Mapping[str, Exporter] = self._table(Exporter)
        self.bench_methods: Mapping[str, BenchMethod] = self._table(BenchMethod)
        self._implementations: dict[Descriptor, Any] = {}

    def family(self, name: str) -> Family:
        """The family called ``name``, or PluginError."""
        return self._get(Family, self.families, name)

    def format(self, name: str) -> Format:
        """The checkpoint format called ``name``, or PluginError."""
        return self._get(Format, self.formats, name)

    def backend(self, name: str) -> Backend:
        """The backend called ``name``, or PluginError."""
        return self._get(Backend, self.backends, name)

    def exporter(self, name: str) -> Exporter:
        """The exporter called ``name``, or PluginError."""
        return self._get(Exporter, self.exporters, name)

    def bench_method(self, name: str) -> BenchMethod:
        """The bench method called ``name``, or PluginError."""
        return self._get(BenchMethod, self.bench_methods, name)

    def implementation(self, descriptor: Descriptor) -> Any:
        """What a descriptor's target names, imported on first use; a class is instantiated, once.

        Raises PluginError: "not installed" where a module of ``descriptor.requires`` is missing,
        "broken" for everything else that goes wrong.
        """
        if descriptor not in self._implementations:
            self._implementations[descriptor] = self._import(descriptor)
        return self._implementations[descriptor]

    def owner(self, descriptor: Descriptor) -> FoundPlugin:
        """The plugin that offers a descriptor of this manager; KeyError for any other."""
        for plugin in self.plugins:
            if descriptor in plugin.offers:
                return plugin.found
        raise KeyError(descriptor.name)

    def _table(self, kind: type[D]) -> dict[str, D]:
        offers = [d for plugin in self.plugins for d in plugin.offers if isinstance(d, kind)]
        return {descriptor.name: descriptor for descriptor in sorted(offers, key=_name)}

    def _get(self, kind: type[D], table: Mapping[str, D], name: str) -> D:
        if name in table:
            return table[name]
        raise self._absence(kind, table, name)

    def _absence(
        self, kind: type[Descriptor], table: Mapping[str, Descriptor], name: str
    ) -> PluginError:
        """Why there is nothing of this name, as an error to raise."""
        what = f"{KINDS[kind]} {name!r}"
        extra = next((e for e, offers in OFFICIAL.items() if (kind, name) in offers), None)
        for broken in self.broken:
            offered = any(type(d) is kind and d.name == name for d in broken.offers)
            if offered or broken.found.name in (extra, name):
                return _caused(f"{what} cannot be used: {broken}", broken.error)
        for disabled in self.disabled:
            if disabled.name in (extra, name):
                return PluginError(f"{what} cannot be used: {DISABLED} names {disabled}")
        if extra:
            return PluginError(f'{what} is not installed: pip install "linnet[{extra}]"')
        official = [n for offers in OFFICIAL.values() for k, n in offers if k is kind]
        close = get_close_matches(name, [*table, *official], n=1)
        if close:
            return PluginError(f"there is no {what}: did you mean {close[0]!r}?")
        installed = f"installed: {', '.join(table) or 'none'}"
        if not self.broken:
            return PluginError(f"there is no {what} ({installed})")
        # A plugin whose module cannot be imported does not say what it would have offered.
        suspects = "; ".join(map(str, self.broken))
        message = f"there is no {what} ({installed}). It may be what a broken plugin offers: "
        return _caused(message + suspects, self.broken[0].error)

    def _import(self, descriptor: Descriptor) -> Any:
        what = f"{KINDS[type(descriptor)]} {descriptor.name!r}"
        module_name, _, path = descriptor.target.partition(":")
        try:
            target: Any = import_module(module_name)
            for attribute in path.split("."):
                target = getattr(target, attribute)
            return target() if isinstance(target, type) else target
        except (Exception, SystemExit) as error:
            missing = missing_requirement(descriptor, error)
            if missing:
                install = getattr(descriptor, "extra", "") or missing
                raise PluginError(
                    f"{what} needs the module {missing}, which is not installed: "
                    f'pip install "{install}"'
                ) from error
            owner = self.owner(descriptor)
            raise PluginError(
                f"{what} of {owner} is broken: {one_line(error)} "
                f"(see: linnet plugins doctor {owner.name})"
            ) from error


@cache
def plugin_manager() -> PluginManager:
    """The plugins of this process, found and loaded when first asked for."""
    found, unreadable = find_plugins()
    disabled = disabled_names()
    return load_plugins(
        [plugin for plugin in found if plugin.name not in disabled],
        broken=unreadable,
        disabled=[plugin for plugin in found if plugin.name in disabled],
    )


def load_plugins(
    found: Iterable[FoundPlugin],
    *,
    broken: Iterable[BrokenPlugin] = (),
    disabled: Iterable[FoundPlugin] = (),
) -> PluginManager:
    """Load and register plugins one by one; two that share a name are not even loaded."""
    alone, collided = _settle_names(found)
    failed = [*broken, *collided]
    registered: list[RegisteredPlugin] = []
    for plugin in alone:
        loaded = load_plugin(plugin)
        result = loaded if isinstance(loaded, BrokenPlugin) else register_plugin(loaded)
        if isinstance(result, BrokenPlugin):
            failed.append(result)
        else:
            registered.append(result)
    return PluginManager(registered, failed, disabled)


def missing_requirement(descriptor: Descriptor, error: BaseException) -> str | None:
    """The missing module, where a failed import means "not installed" and not "broken inside"."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    required = getattr(descriptor, "requires", ())
    return missing if missing and missing.partition(".")[0] in required else None


def _settle_names(
    found: Iterable[FoundPlugin],
) -> tuple[list[FoundPlugin], list[BrokenPlugin]]:
    """Those that are alone in their name, or Linnet's own; and the others."""
    alone: list[FoundPlugin] = []
    collided: list[BrokenPlugin] = []
    for name, group in groupby(sorted(found, key=_name), key=_name):
        claimants = list(group)
        winners = claimants if len(claimants) == 1 else [c for c in claimants if c.builtin]
        error = _collision(f"the plugin name {name!r}", claimants)
        alone += winners
        collided += [BrokenPlugin(c, Stage.COLLISION, error) for c in claimants if c not in winners]
    return alone, collided


def _settle_claims(
    plugins: list[RegisteredPlugin],
) -> tuple[list[RegisteredPlugin], list[BrokenPlugin]]:
    """Those whose every claim is theirs alone, or Linnet's own; and the others."""
    claimants: dict[tuple[str, str], list[FoundPlugin]] = {}
    for plugin, claim in _all_claims(plugins):
        claimants.setdefault(claim, []).append(plugin.found)
    errors: dict[FoundPlugin, PluginError] = {}
    for (kind, name), owners in claimants.items():
        if len(owners) > 1:
            error = _collision(f"the {kind} {name!r}", owners)
            errors.update({owner: error for owner in owners if not owner.builtin})
    good = [plugin for plugin in plugins if plugin.found not in errors]
    collided = [
        BrokenPlugin(plugin.found, Stage.COLLISION, errors[plugin.found], plugin.offers)
        for plugin in plugins
        if plugin.found in errors
    ]
    return good, collided


def _all_claims(
    plugins: Iterable[RegisteredPlugin],
) -> Iterator[tuple[RegisteredPlugin, tuple[str, str]]]:
    for plugin in plugins:
        for descriptor in plugin.offers:
            for claim in claims(descriptor):
                yield plugin, claim


def _collision(what: str, claimants: list[FoundPlugin]) -> PluginError:
    names = " and by ".join(f"{c.distribution} {c.version}" for c in claimants)
    others = [claimant.distribution for claimant in claimants if not claimant.builtin]
    return PluginError(f"{what} is claimed by {names}: pip uninstall {' or '.join(others)}")


def _caused(message: str, cause: BaseException) -> PluginError:
    error = PluginError(message)
    error.__cause__ = cause
    return error


def _name(item: FoundPlugin | Descriptor) -> str:
    return item.name

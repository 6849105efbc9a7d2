"""From a model's name to a model that runs: locate, open, recognise, bind, load.

Formats, families and backends are found through the plugins; this module names none.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from linnet.errors import CheckpointError, ConfigError, PluginError, UnavailableError
from linnet.plugins.descriptors import Backend, Capability, Family, Format
from linnet.plugins.interfaces import BackendInterface, LoadOptions
from linnet.runtime.threads import thread_budget

if TYPE_CHECKING:
    from linnet.plugins.manager import PluginManager
    from linnet.runtime.model import Model
    from linnet.weights.binding import BoundModel
    from linnet.weights.checkpoint import Checkpoint

DEFAULT_MAX_SEQ = 2048
"""Positions of a cache row when none is asked for, or fewer if the model was made for fewer.

A cache as long as a modern context would take more memory than the weights.
"""


def load(
    model: str | Path,
    *,
    backend: str | None = None,
    mode: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    rows: int = 1,
    max_seq: int | None = None,
    threads: int | None = None,
    numerics: str = "fast",
    report: Callable[[str], None] | None = None,
) -> "Model":
    """Load a model so that it generates.

    ``model`` is a Nest name, a folder, a file or a Hub repository. What is left None is chosen
    here or by the backend, and ``model.granted`` says what was chosen: the available backend of
    the highest priority, the model's context up to ``DEFAULT_MAX_SEQ`` positions, the threads
    that affinity and container allow. ``rows`` is how many prompts run at once; ``numerics`` is
    ``fast`` or ``exact``; ``report`` is told of downloads.

    Raises UnavailableError for what cannot be granted, and what ``bind`` raises.
    """
    from linnet.plugins.manager import plugin_manager
    from linnet.runtime.model import Model

    if numerics not in ("fast", "exact"):
        raise UnavailableError(f"numerics is {numerics!r}; it is 'fast' or 'exact'")
    if rows < 1:
        raise UnavailableError(f"rows is {rows}; it must be 1 or more")
    budget = thread_budget(threads)
    manager = plugin_manager()
    if backend is not None:
        manager.backend(backend)  # a wrong name is found before a model is fetched
    bound = bind(model, report=report)
    context, notes = _context(bound, max_seq)
    chosen, implementation, passed_over = _backend(manager, backend)
    for line in (*bound.notes, *passed_over):
        (report or _silent)(f"note: {line}")
    options = LoadOptions(
        mode=mode,
        dtype=dtype,
        device=device,
        rows=rows,
        max_seq=context,
        threads=budget,
        numerics=numerics,
    )
    session = implementation.load(bound, options)
    return Model(bound, session, chosen, (*passed_over, *notes))


def bind(model: str | Path, *, report: Callable[[str], None] | None = None) -> "BoundModel":
    """Find a model, open its checkpoint, recognise its family and match every tensor.

    Nothing is run and no framework is imported. Raises SourceError, CheckpointError, ConfigError
    or BindingError, for each step in turn.
    """
    from linnet.nest.sources import locate
    from linnet.plugins.manager import plugin_manager

    manager = plugin_manager()
    path = locate(model, report=report)
    checkpoint: Checkpoint = manager.implementation(_format(manager, path)).open(path)
    family = _family(manager, checkpoint)
    bound: BoundModel = manager.implementation(family).bind(checkpoint)
    return bound


def _format(manager: "PluginManager", path: Path) -> Format:
    """The one format that a path is of."""
    formats = list(manager.formats.values())
    found = [descriptor for descriptor in formats if _matches(descriptor, path)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(sorted(descriptor.name for descriptor in found))
        raise CheckpointError(f"{path} holds checkpoints of {names}; name the file that you mean")
    if any(name.endswith(".gguf") for name in _names(path)):
        manager.format("gguf")  # says why it is not there, and what to install
    known = "; ".join(
        f"{descriptor.name} ({', '.join((*descriptor.suffixes, *descriptor.markers))})"
        for descriptor in formats
    )
    raise CheckpointError(
        f"{path} is not a checkpoint of any installed format{_suspects(manager)}; known: {known}"
    )


def _names(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name]


def _matches(descriptor: Format, path: Path) -> bool:
    if path.is_dir():
        markers = descriptor.markers
        return any(fnmatch(name, marker) for name in _names(path) for marker in markers)
    return path.name.lower().endswith(descriptor.suffixes)


def _family(manager: "PluginManager", checkpoint: "Checkpoint") -> Family:
    """The family that recognises a config's ``model_type``."""
    model_type = checkpoint.config.get("model_type")
    families = manager.families.values()
    for family in families:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in families for name in family.model_types))
    raise ConfigError(
        f"no installed family has the model_type {model_type!r} of {checkpoint.location}"
        f"{_suspects(manager)}; known: {known}"
    )


def _suspects(manager: "PluginManager") -> str:
    """What may be missing for a plugin's fault: a broken one does not say what it would offer."""
    broken = "; ".join(map(str, manager.broken))
    return f" (it may be what a broken plugin offers: {broken})" if broken else ""


def _backend(
    manager: "PluginManager", name: str | None
) -> tuple[Backend, BackendInterface, list[str]]:
    """The backend asked for, or the first that can generate here; and why not an earlier one."""
    if name is not None:
        descriptor = manager.backend(name)
        implementation: BackendInterface = manager.implementation(descriptor)
        probe = implementation.probe()
        if not probe.available:
            raise UnavailableError(f"the {name} backend is not available: {probe.detail}")
        return descriptor, implementation, []
    passed_over: list[str] = []
    for descriptor in _by_priority(list(manager.backends.values())):
        try:
            implementation = manager.implementation(descriptor)
        except PluginError as error:
            passed_over.append(f"not using the {descriptor.name} backend: {error}")
            continue
        probe = implementation.probe()
        if probe.available:
            if descriptor.priority < 0:
                passed_over.append(
                    f"no faster backend can run here: {descriptor.title} does, slowly; "
                    'pip install "linnet[torch]", or ask for it by name'
                )
            return descriptor, implementation, passed_over
        passed_over.append(f"not using the {descriptor.name} backend: {probe.detail}")
    reasons = "; ".join(passed_over) or "none is installed"
    raise UnavailableError(f"no backend can generate here{_suspects(manager)}: {reasons}")


def _silent(_: str) -> None:
    """Nobody asked to be told; ``Model.notes`` has it."""


def _by_priority(backends: Sequence[Backend]) -> list[Backend]:
    """Those that can generate, highest priority first, ties by name."""
    needed = {Capability.CACHE, Capability.CHOICE}
    able = [descriptor for descriptor in backends if needed <= descriptor.capabilities]
    return sorted(able, key=lambda descriptor: (-descriptor.priority, descriptor.name))


def _context(bound: "BoundModel", asked: int | None) -> tuple[int, tuple[str, ...]]:
    """Positions of a cache row, with a note where the model could have more."""
    most = bound.max_positions
    if asked is not None:
        if asked < 1 or (most is not None and asked > most):
            limit = "" if most is None else f" to {most}, the positions that the model was made for"
            raise UnavailableError(f"max_seq is {asked}; it must be from 1{limit}")
        return asked, ()
    if most is not None and most <= DEFAULT_MAX_SEQ:
        return most, ()
    can = "states no longest context" if most is None else f"was made for {most} positions"
    note = f"the model {can}; a cache row has {DEFAULT_MAX_SEQ} (ask for more with max_seq)"
    return DEFAULT_MAX_SEQ, (note,)

"""``linnet check MODEL``: how far every installed backend is from the reference.

The reference is a backend in f32: the best that is available by ``reference_priority`` (so
Transformers where linnet-hf is installed, else NumPy), or the one ``--reference`` names. Every
other backend runs the same random tokens: ``forward`` over all of them, and where it has a cache
``extend`` in uneven chunks and then ``decode`` one by one. Sessions are closed one after the
other, so memory holds one model and two sets of logits.

``--json`` prints one object:

- ``model``, ``location``, ``family``, ``tokens``, ``seed``, ``notes`` (of the model);
- ``reference``: what it was granted (``backend``, ``mode``, ``dtype``, ``device``, ...);
- ``passed_over``: references that would have come first, each with the reason;
- ``passed``: what the exit status says;
- ``rows``: an object for each comparison, and for each backend that gave none: ``backend``,
  ``mode``, ``dtype``, ``entry``, ``status``, ``reason``, ``granted``, ``bound``, ``distance``.
  ``status`` is ``passed`` or ``failed`` against ``bound``, ``measured`` where there is no bound,
  ``unavailable`` or ``skipped``; ``distance`` is as ``linnet.distance`` tells it. What there is
  not is null.
"""

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linnet.cli.output import note, print_json, print_table
from linnet.cli.run import DeviceOption, ModelArgument, ThreadsOption
from linnet.errors import PluginError, UnavailableError

if TYPE_CHECKING:
    from linnet.distance import Distance
    from linnet.plugins.descriptors import Backend
    from linnet.plugins.interfaces import Granted, LoadOptions, Session
    from linnet.plugins.manager import PluginManager
    from linnet.weights.binding import BoundModel
    from linnet.weights.checkpoint import Array

BOUNDS = {"f32": 1e-3, "f64": 1e-3}
"""The largest difference of a logit that passes where ``--bound`` does not say. A narrower dtype
is as far off as it is: it is measured."""
TOKENS = 512
CHUNKS = (1, 7, 19, 64, 127)
"""Lengths of ``extend`` calls, over and over: below, at and beside the sizes that kernels like."""
DECODED = 32
"""Tokens at the end that ``decode`` takes one by one, at most."""
SKIPPED = {"reference": "NumPy is slow; --backend reference runs it"}
"""Backends that run only when they are asked for by name."""


@dataclass(frozen=True)
class Target:
    """A backend to compare. ``asked`` says that the user named it: then it must be available."""

    backend: "Backend"
    mode: str
    dtype: str
    asked: bool


@dataclass(frozen=True)
class Row:
    """One comparison, or why there is none."""

    target: Target
    status: str
    reason: str | None = None
    entry: str | None = None
    granted: "Granted | None" = None
    bound: float | None = None
    distance: "Distance | None" = None

    @property
    def bad(self) -> bool:
        """Whether the command fails for it."""
        return self.status == "failed" or (self.status == "unavailable" and self.target.asked)


@dataclass(frozen=True)
class Reference:
    """Logits f32 ``[1, S, V]`` of ``tokens`` ``[1, S]``, and what they were computed with."""

    backend: "Backend"
    granted: "Granted"
    tokens: "Array"
    logits: "Array"
    passed_over: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Add ``linnet check``."""
    app.command("check")(check)


def check(
    model: ModelArgument,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:MODE]",
            help="Which to compare; may be given again. All in their first mode when left out.",
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The reference; the best one available when left out.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="f32, bf16, f16, or several with commas.")] = "f32",
    tokens: Annotated[
        int | None,
        typer.Option(help="How many random tokens; 512, or what the model allows, when left out."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the tokens.")] = 0,
    bound: Annotated[
        float | None,
        typer.Option(help="The largest difference of a logit; 1e-3 for f32 when left out."),
    ] = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the logits of every installed backend with the reference's.

    Exit status 1 when one is beyond the bound, gives what is not finite, or was named and cannot
    run; and when there was nothing to compare. bf16 and f16 have no bound but --bound.
    """
    from linnet.plugins.interfaces import LoadOptions
    from linnet.plugins.manager import plugin_manager
    from linnet.runtime.load import bind
    from linnet.runtime.threads import thread_budget

    if bound is not None and not bound >= 0:
        raise typer.BadParameter(f"--bound is {bound}; it must be 0 or more")
    manager = plugin_manager()
    dtypes = _dtypes(dtype)
    asked = [_named(manager, name) for name in backend or ()]
    bound_model = bind(model, report=note)
    count = _token_count(tokens, bound_model.max_positions)
    options = LoadOptions(device=device, max_seq=count, threads=thread_budget(threads))
    with redirect_stdout(sys.stderr):  # frameworks may print as they are imported
        truth = run_reference(
            manager, bound_model, random_tokens(bound_model.vocab, count, seed), reference, options
        )
        rows = [
            row
            for target in choose_targets(manager, asked, dtypes, truth, device)
            for row in compare_target(manager, bound_model, truth, target, options, bound)
        ]
    compared = any(row.distance for row in rows)
    passed = compared and not any(row.bad for row in rows)
    if as_json:
        print_json(
            {
                "model": model,
                "location": bound_model.checkpoint.location,
                "family": bound_model.program.family,
                "tokens": count,
                "seed": seed,
                "notes": bound_model.notes,
                "reference": truth.granted,
                "passed_over": truth.passed_over,
                "passed": passed,
                "rows": [_json_row(row) for row in rows],
            }
        )
    else:
        print_report(bound_model, truth, seed, rows)
    if not compared:
        note('error: nothing was compared: pip install "linnet[torch]", or name a --backend')
    if not passed:
        raise typer.Exit(1)


def random_tokens(vocab: int, count: int, seed: int) -> "Array":
    """Random ids i32 ``[1, count]``; the first one does not come again, so it can be told apart."""
    import numpy as np

    ids = np.random.default_rng(seed).integers(0, vocab, (1, count), dtype=np.int32)
    again = ids[0, 1:] == ids[0, 0]
    ids[0, 1:][again] = (ids[0, 0] + 1) % vocab
    return ids


def run_reference(
    manager: "PluginManager",
    model: "BoundModel",
    tokens: "Array",
    name: str | None,
    options: "LoadOptions",
) -> Reference:
    """The reference's logits, f32 on its own choice of device.

    Without a name, those that cannot run this model here are passed over, each with its reason;
    any other error is raised: that a checkpoint does not fit is no reason to look elsewhere.
    """
    from dataclasses import replace

    from linnet.plugins.descriptors import Capability

    needed = {Capability.REFERENCE, Capability.FORWARD}
    if name is None:
        able = [b for b in manager.backends.values() if needed <= b.capabilities]
        candidates = sorted(able, key=lambda b: (-b.reference_priority, b.name))
    else:
        candidates = [manager.backend(name)]
        if not needed <= candidates[0].capabilities:
            raise UnavailableError(f"the {name} backend does not serve as a reference")
    passed_over = []
    for backend in candidates:
        wanted = replace(options, mode=backend.modes[0], dtype="f32", device=None)
        try:
            with closing(open_session(manager, backend, model, wanted)) as session:
                granted = session.granted
                logits = session.run("forward", {"tokens": tokens})
        except (PluginError, UnavailableError) as error:
            if name is not None:
                raise
            passed_over.append(f"{backend.name}: {error}")
        else:
            return Reference(backend, granted, tokens, logits, tuple(passed_over))
    raise UnavailableError(
        f"no backend can be the reference here: {'; '.join(passed_over) or 'none is installed'}"
    )


def choose_targets(
    manager: "PluginManager",
    asked: Sequence[tuple["Backend", str]],
    dtypes: Sequence[str],
    truth: Reference,
    device: str | None,
) -> Iterator[Target]:
    """What was asked for, else every backend; not the reference against itself."""
    for dtype in dtypes:
        for backend, mode in asked:
            yield Target(backend, mode, dtype, asked=True)
        if not asked:
            for backend in manager.backends.values():
                itself = backend == truth.backend and dtype == "f32" and device is None
                if not itself:
                    yield Target(backend, backend.modes[0], dtype, asked=False)


def compare_target(
    manager: "PluginManager",
    model: "BoundModel",
    truth: Reference,
    target: Target,
    options: "LoadOptions",
    bound: float | None,
) -> list[Row]:
    """A row for every entry that the backend has, or one that says why there is none."""
    from dataclasses import replace

    from linnet.distance import compare

    backend = target.backend
    if target.dtype not in backend.dtypes:
        return [Row(target, "unavailable", f"it computes in {', '.join(backend.dtypes)}")]
    if backend.name in SKIPPED and not target.asked:
        return [Row(target, "skipped", SKIPPED[backend.name])]
    limit = BOUNDS.get(target.dtype) if bound is None else bound
    wanted = replace(options, mode=target.mode, dtype=target.dtype)
    rows: list[Row] = []
    entry: str | None = None
    granted = None
    try:
        with closing(open_session(manager, backend, model, wanted)) as session:
            granted = session.granted
            if (granted.mode, granted.dtype) != (target.mode, target.dtype):
                raise UnavailableError(
                    f"{target.mode} in {target.dtype} was asked for, and {granted.mode} in "
                    f"{granted.dtype} granted"
                )
            for name, positions, other in outputs(session, backend, truth.tokens):
                entry = name
                found = compare(truth.logits[:, positions], other, positions=positions)
                status, reason = judge(found, limit)
                rows.append(Row(target, status, reason, entry, granted, limit, found))
    except (PluginError, UnavailableError) as error:
        rows.append(Row(target, "unavailable", str(error), granted=granted))
    except Exception as error:  # a backend's own fault must not hide how the others do
        note("".join(traceback.format_exception(error)).rstrip())
        where = "" if entry is None else f" after {entry}"
        reason = f"{type(error).__name__}{where}: {error}"
        rows.append(Row(target, "failed", reason, granted=granted, bound=limit))
    return rows


def outputs(
    session: "Session", backend: "Backend", tokens: "Array"
) -> Iterator[tuple[str, "Array", "Array"]]:
    """Each entry's logits f32 ``[1, n, V]``, with the n positions that they are of."""
    import numpy as np

    from linnet.plugins.descriptors import Capability

    count = tokens.shape[1]
    if Capability.FORWARD in backend.capabilities:
        yield "forward", np.arange(count), session.run("forward", {"tokens": tokens})
    if Capability.CACHE not in backend.capabilities:
        return
    decoded = min(DECODED, count // 4)
    start = 0
    ends: list[int] = []
    logits = []
    while start < count - decoded:
        size = min(CHUNKS[len(ends) % len(CHUNKS)], count - decoded - start)
        where = {"rows": [0], "starts": [start], "lengths": [size]}
        inputs = {name: np.array(value, np.int32) for name, value in where.items()}
        logits.append(session.run("extend", {"tokens": tokens[:, start : start + size], **inputs}))
        start += size
        ends.append(start - 1)
    yield "extend", np.array(ends), np.stack(logits, axis=1)
    if decoded:
        positions = np.arange(start, count, dtype=np.int32)
        steps = [
            session.run("decode", {"tokens": tokens[:, at], "positions": positions[i : i + 1]})
            for i, at in enumerate(positions)
        ]
        yield "decode", positions, np.stack(steps, axis=1)


def judge(distance: "Distance", bound: float | None) -> tuple[str, str | None]:
    """The status of a comparison, with the reason where it failed."""
    at = f"position {distance.max_abs_at.position}, token {distance.max_abs_at.token}"
    if distance.non_finite:
        return "failed", f"{distance.non_finite} logits are not finite, the first at {at}"
    if bound is None:
        return "measured", None
    if distance.within(bound):
        return "passed", None
    return "failed", f"{distance.max_abs:.3g} at {at} is beyond {bound:g}"


def open_session(
    manager: "PluginManager", backend: "Backend", model: "BoundModel", options: "LoadOptions"
) -> "Session":
    """A session for the caller to close. Raises PluginError or UnavailableError for none."""
    implementation = manager.implementation(backend)
    probe = implementation.probe()
    if not probe.available:
        raise UnavailableError(probe.detail)
    session: Session = implementation.load(model, options)
    return session


def print_report(model: "BoundModel", truth: Reference, seed: int, rows: Sequence[Row]) -> None:
    """The table for people, on stdout; notes on stderr."""
    from linnet.distance import BANDS, Band

    granted = truth.granted
    for line in (*model.notes, *(f"reference passed over: {each}" for each in truth.passed_over)):
        note(f"note: {line}")
    about = f" ({', '.join(granted.notes)})" if granted.notes else ""
    print(f"{model.checkpoint.location}: {truth.tokens.shape[1]} random tokens, seed {seed}")
    print(
        f"reference: {granted.backend} {granted.mode}, {granted.dtype} on {granted.device}{about}"
    )
    print()
    names = [Band(*band, 0, 0).name for band in BANDS]
    present = {band.name for row in rows if row.distance for band in row.distance.bands}
    bands = [name for name in names if name in present]
    header = ("BACKEND", "MODE", "DTYPE", "DEVICE", "ENTRY", "MAX ABS", "KL", "TOP-1")
    print_table((*header, *bands, "DIVERGES", "STATUS"), [_cells(row, bands) for row in rows])


def _cells(row: Row, bands: Sequence[str]) -> list[str]:
    target, distance = row.target, row.distance
    device = row.granted.device if row.granted else "-"
    cells = [target.backend.name, target.mode, target.dtype, device, row.entry or "-"]
    if distance is None:
        cells += ["-"] * (4 + len(bands))
    else:
        shares = {band.name: _percent(band.top1) for band in distance.bands}
        cells += [f"{distance.max_abs:.2e}", f"{distance.kl:.2e}", _percent(distance.top1)]
        cells += [shares.get(name, "-") for name in bands]
        first = distance.first_divergence[0]
        cells.append("nowhere" if first is None else f"at {first}")
    cells.append(row.status if row.reason is None else f"{row.status}: {row.reason}")
    return cells


def _percent(share: float) -> str:
    """Rounded down: 100% is said of nothing less."""
    return f"{math.floor(share * 1000) / 10:g}%"


def _json_row(row: Row) -> dict[str, Any]:
    return {
        "backend": row.target.backend.name,
        "mode": row.target.mode,
        "dtype": row.target.dtype,
        "entry": row.entry,
        "status": row.status,
        "reason": row.reason,
        "granted": row.granted,
        "bound": row.bound,
        "distance": row.distance.to_json() if row.distance else None,
    }


def _dtypes(text: str) -> list[str]:
    from linnet.plugins.registration import RUN_DTYPES

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    wrong = [name for name in names if name not in RUN_DTYPES]
    if wrong:
        raise typer.BadParameter(f"--dtype has {wrong[0]!r}, not {', '.join(sorted(RUN_DTYPES))}")
    return names


def _named(manager: "PluginManager", text: str) -> tuple["Backend", str]:
    """The backend and mode of ``NAME[:MODE]``."""
    name, _, mode = text.partition(":")
    backend = manager.backend(name)
    if mode and mode not in backend.modes:
        raise UnavailableError(
            f"the {name} backend has no mode {mode!r}; it has {', '.join(backend.modes)}"
        )
    return backend, mode or backend.modes[0]


def _token_count(asked: int | None, most: int | None) -> int:
    if asked is None:
        return TOKENS if most is None else min(TOKENS, most)
    if asked < 1 or (most is not None and asked > most):
        limit = "or more" if most is None else f"to {most}, the positions of this model"
        raise typer.BadParameter(f"--tokens is {asked}; it must be 1 {limit}")
    return asked

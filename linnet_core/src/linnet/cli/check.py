"""``linnet check MODEL``: how far every installed backend is from the reference.

The reference is a backend in f32: the best that is available by ``reference_priority`` (so
Transformers where linnet-hf is installed, else NumPy), or the one ``--reference`` names. Every
other backend runs the same random tokens: ``forward`` over all of them, and where it has a cache
``extend`` in uneven chunks and then ``decode`` one by one. The NumPy backend is slow: it runs when
it is the reference, or asked for by name.

``--json`` prints one object:

- ``model``, ``location``, ``family``, ``tokens``, ``seed``, ``notes`` (of the
  checkpoint and the model);
- ``reference``: what it was granted (``backend``, ``mode``, ``dtype``, ``device``, ...);
- ``noise``: the distance of the reference from itself, with fewer tokens at the end;
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
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linnet.cli.comparison import (
    Reference,
    Row,
    choose_targets,
    compare_target,
    random_tokens,
    run_reference,
)
from linnet.cli.output import note, print_json, print_table
from linnet.cli.run import DeviceOption, ModelArgument, ThreadsOption
from linnet.errors import UnavailableError

if TYPE_CHECKING:
    from linnet.plugins.descriptors import Backend
    from linnet.plugins.manager import PluginManager
    from linnet.weights.binding import BoundModel

TOKENS = 512


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
        typer.Option(
            help="The largest difference of a logit; for f32, when left out, 1e-3, or up to 1e-2 "
            "as far as the reference's own noise asks for it."
        ),
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
                "notes": [*bound_model.checkpoint.notes, *bound_model.notes],
                "reference": truth.granted,
                "noise": truth.noise.to_json(),
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


def print_report(model: "BoundModel", truth: Reference, seed: int, rows: Sequence[Row]) -> None:
    """The table for people, on stdout; notes on stderr."""
    from linnet.distance import BANDS, Band

    granted = truth.granted
    passed_over = [f"reference passed over: {each}" for each in truth.passed_over]
    for line in (*model.checkpoint.notes, *model.notes, *passed_over):
        note(f"note: {line}")
    about = f" ({', '.join(granted.notes)})" if granted.notes else ""
    print(f"{model.checkpoint.location}: {truth.tokens.shape[1]} random tokens, seed {seed}")
    print(
        f"reference: {granted.backend} {granted.mode}, {granted.dtype} on {granted.device}{about}"
    )
    print(f"its own noise: max abs {truth.noise.max_abs:.2e}, KL {truth.noise.kl:.2e}")
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

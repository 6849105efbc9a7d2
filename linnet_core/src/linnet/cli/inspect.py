"""``linnet inspect MODEL``: what a model is, without running it."""

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linnet.cli.output import note, print_json, print_table
from linnet.cli.run import ModelArgument

if TYPE_CHECKING:
    from linnet.spec.program import Function
    from linnet.weights.binding import BoundModel


def register(app: typer.Typer) -> None:
    """Add ``linnet inspect``."""
    app.command("inspect")(inspect)


def inspect(
    model: ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    source: Annotated[
        str | None, typer.Option(metavar="BACKEND", help="Print the source this backend generates.")
    ] = None,
    program: Annotated[
        bool, typer.Option("--program", help="Print the whole program, as text or as JSON.")
    ] = False,
    functions: Annotated[
        bool, typer.Option("--functions", help="Print the functions that the entries call.")
    ] = False,
) -> None:
    """Show a model's config, parameters, states and program; nothing is run.

    Imports no framework, except for --source.
    """
    if sum((source is not None, program, functions)) > 1:
        raise typer.BadParameter("--source, --program and --functions exclude one another")
    if as_json and (source is not None or functions):
        raise typer.BadParameter("--json goes with the summary and with --program")
    from linnet.runtime.load import bind
    from linnet.spec.serialize import function_text, to_json, to_text

    bound = bind(model, report=note)
    if source is not None:
        print(generated_source(bound, source))
    elif program:
        print(to_json(bound.program) if as_json else to_text(bound.program))
    elif functions:
        texts = ["\n".join(function_text(f)) for f in bound.program.functions.values()]
        print("\n\n".join(texts))
    elif as_json:
        print_json(summary(bound))
    else:
        print_summary(summary(bound))


def generated_source(bound: "BoundModel", name: str) -> str:
    """The source that a backend generates for a model.

    A backend whose implementation has ``source(model, options)`` shows it without loading
    weights; any other is asked to load the model. Raises UnavailableError where there is none.
    """
    from linnet.errors import UnavailableError
    from linnet.plugins.descriptors import Capability
    from linnet.plugins.interfaces import LoadOptions
    from linnet.plugins.manager import plugin_manager

    manager = plugin_manager()
    descriptor = manager.backend(name)
    if Capability.SOURCE not in descriptor.capabilities:
        able = [b.name for b in manager.backends.values() if Capability.SOURCE in b.capabilities]
        raise UnavailableError(
            f"the {name} backend generates no source; those that do: {', '.join(able) or 'none'}"
        )
    implementation = manager.implementation(descriptor)
    options = LoadOptions(max_seq=bound.max_positions)
    if hasattr(implementation, "source"):
        text: str | None = implementation.source(bound, options)
    else:
        with closing(implementation.load(bound, options)) as session:
            text = session.source()
    if text is None:
        raise UnavailableError(f"the {name} backend showed no source for this model")
    return text


def summary(bound: "BoundModel") -> dict[str, Any]:
    """What ``--json`` says; sizes are in bytes as the checkpoint's tensors are read."""
    from linnet.spec.serialize import fingerprint

    checkpoint, program = bound.checkpoint, bound.program
    tensors = checkpoint.tensors.values()
    return {
        "location": checkpoint.location,
        "format": checkpoint.format,
        "family": program.family,
        "fingerprint": fingerprint(program),
        "config": bound.describe,
        "vocab": bound.vocab,
        "max_positions": bound.max_positions,
        "parameters": program.parameter_count,
        "bytes": checkpoint.nbytes(),
        "stored": Counter(tensor.encoding or str(tensor.dtype) for tensor in tensors),
        "tied": {p.path: p.tied_to for p in program.parameters if p.tied_to is not None},
        "states": {state.path: str(state.type) for state in program.states},
        "entries": {name: _signature(entry) for name, entry in program.entries.items()},
        "functions": {name: _signature(each) for name, each in program.functions.items()},
        "notes": [*checkpoint.notes, *bound.notes],
    }


def print_summary(about: dict[str, Any]) -> None:
    """The summary for people."""
    stored = ", ".join(f"{count} {kind}" for kind, count in about["stored"].items())
    rows = [
        ("location", str(about["location"])),
        ("format", f"{about['format']} ({stored} tensors)"),
        ("family", about["family"]),
        ("parameters", f"{about['parameters']:,}"),
        ("bytes", f"{about['bytes']:,}"),
        *((f"tied {path}", f"to {other}") for path, other in about["tied"].items()),
        ("vocab", f"{about['vocab']:,}"),
        ("max positions", str(about["max_positions"] or "not stated")),
        ("program", about["fingerprint"][:16]),
    ]
    print_table(("MODEL", ""), rows)
    print()
    print_table(("CONFIG", ""), [(key, _short(value)) for key, value in about["config"].items()])
    print()
    kinds = Counter(about["states"].values())
    print_table(("STATES", ""), [(f"{count} times", kind) for kind, count in kinds.items()])
    print()
    print_table(("ENTRIES", ""), list(about["entries"].items()))
    for line in about["notes"]:
        note(f"note: {line}")


def _short(value: Any) -> str:
    """A config's value, where a list as long as the model is deep does not fill the screen."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        if len(value) > 1 and all(item == value[0] for item in value):
            return f"{len(value)} times {_short(value[0])}"
        shown = [_short(item) for item in value]
        if len(shown) > 6:
            shown[3:-1] = ["..."]
        return f"[{', '.join(shown)}]"
    return str(value)


def _signature(function: "Function") -> str:
    inputs = ", ".join(f"{value.name or value.index}: {value.type}" for value in function.inputs)
    return f"({inputs}) -> {', '.join(str(value.type) for value in function.outputs)}"

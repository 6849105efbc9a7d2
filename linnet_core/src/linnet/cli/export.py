"""``linnet export EXPORTER MODEL -o DIR``: a model for another engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linnet.cli.output import note, print_json
from linnet.cli.run import ModelArgument

if TYPE_CHECKING:
    from linnet.plugins.interfaces import Artifact


def register(app: typer.Typer) -> None:
    """Add ``linnet export``."""
    app.command("export")(export)


def export(
    exporter: Annotated[
        str,
        typer.Argument(metavar="EXPORTER", help="What to write: `linnet plugins list` has them."),
    ],
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="A new or an empty folder.")
    ],
    dtype: Annotated[
        str | None, typer.Option(help="An encoding of the exporter; as stored when left out.")
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Run this engine on it, and fail if it is far off."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another option; may be given again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a model to a folder, whole or not at all."""
    from linnet.plugins.exports import NamedExporter
    from linnet.plugins.manager import plugin_manager
    from linnet.runtime.load import bind

    options = parse_settings(settings or [])
    if dtype is not None:
        options["dtype"] = dtype
    manager = plugin_manager()
    descriptor = manager.exporter(exporter)
    if verify is not None:
        if verify not in descriptor.engines:
            engines = ", ".join(descriptor.engines) or "none"
            raise typer.BadParameter(f"--verify {verify!r}: {exporter} can run {engines}")
        options["verify"] = verify
    named = NamedExporter(descriptor, manager.implementation)
    bound = bind(model, report=note)
    for line in (*bound.checkpoint.notes, *bound.notes):
        note(f"note: {line}")
    show(named.export(bound, output, **options), as_json)


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs as a table; values are text, which the exporter reads."""
    options: dict[str, Any] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key.isidentifier() or key in options:
            raise typer.BadParameter(f"--set {setting!r} is not KEY=VALUE, each key once")
        options[key] = value
    return options


def show(artifact: "Artifact", as_json: bool) -> None:
    """Print what was written."""
    for line in artifact.notes:
        note(f"note: {line}")
    if as_json:
        files = [{"path": str(path), "bytes": path.stat().st_size} for path in artifact.files]
        print_json(
            {
                "folder": str(artifact.folder),
                "files": files,
                "notes": artifact.notes,
                "verification": artifact.verification,
            }
        )
        return
    for path in artifact.files:
        print(path)
    if artifact.verification is not None:
        for line in verified(artifact.verification):
            print(line)


def verified(verification: Mapping[str, Any]) -> list[str]:
    """The distance of the engine that was run, in lines."""
    distance = verification["distance"]
    first = distance["first_divergence"]
    first = first[0] if isinstance(first, list | tuple) else first
    texts, engine = verification["texts"], verification["engine"]
    return [
        f"{engine} ({verification['versions']}) against {verification['reference']}:",
        f"  top-1 agreement {distance['top1']:.4f} over {distance['positions']} positions, "
        f"first divergence {'none' if first is None else f'at {first}'}",
        f"  KL {distance['kl']:.3g}, max abs {distance['max_abs']:.3g}"
        + (f" ({distance['listed']} likeliest tokens)" if "listed" in distance else ""),
        f"  token ids of {texts['compared']} texts: {len(texts['differing'])} differ",
    ]

"""``linnet page RESULTS... -o site/``: the benchmark as static HTML, a page for each model."""

from pathlib import Path
from typing import Annotated

import typer

from linnet.cli.output import note, print_json


def register(app: typer.Typer) -> None:
    """Add ``linnet page``."""
    app.command("page")(page)


def page(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Files of `linnet bench -o`.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder that the pages are written to.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Make static HTML of results files: a page for each, and an index."""
    from linnet.bench.page.site import write_site

    written = write_site(results, output)
    if as_json:
        print_json(written)
    else:
        note(f"{len(results)} {'page' if len(results) == 1 else 'pages'}, with CSV and JSON")
        print(written[0])

"""``linnet nest``: model cards, and the files they stand for."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linnet.cli.output import note, print_json, print_table
from linnet.errors import SourceError

if TYPE_CHECKING:
    from linnet.nest.card import Card, Source

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A name of `linnet nest list`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add ``linnet nest``."""
    group = typer.Typer(help="Model cards and where their files come from.", no_args_is_help=True)
    group.command("list")(list_cards)
    group.command("show")(show)
    group.command("fetch")(fetch)
    group.command("path")(path)
    group.command("verify")(verify)
    group.command("random")(random)
    app.add_typer(group, name="nest")


def list_cards(as_json: JsonOption = False) -> None:
    """List the models that have a card, and which of them are on this machine."""
    from linnet.nest.card import cards

    rows = [_describe(card) for card in cards().values()]
    if as_json:
        print_json(rows)
        return
    table = [
        (row["name"], row["licence"], row["cached"]["kind"] if row["cached"] else "-", row["title"])
        for row in rows
    ]
    print_table(("NAME", "LICENCE", "HERE", "TITLE"), table)


def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show a card: facts, links, and the sources in the order they are tried."""
    from linnet.nest.sources import find_card

    described = _describe(find_card(name))
    if as_json:
        print_json(described)
        return
    cached = described["cached"]
    print(f"{described['title']}: {described['summary']}")
    print_table(
        ("name", described["name"]),
        [
            ("licence", described["licence"]),
            ("tags", ", ".join(described["tags"])),
            *((key, value) for key, value in described["links"].items() if value),
            *((f"config.{key}", str(value)) for key, value in described["config"].items()),
            *(("source", _source_line(source)) for source in described["sources"]),
            ("here", cached["path"] if cached else f"no; fetch it: linnet nest fetch {name}"),
        ],
    )


def fetch(
    model: Annotated[str, typer.Argument(metavar="NAME", help="A Nest name or Hub repository.")],
) -> None:
    """Fetch a model's files, from the first source that has them, and print where they are."""
    from linnet.nest.sources import locate

    print(locate(model, report=note))


def path(name: NameArgument) -> None:
    """Print where a model's files are on this machine; fetches nothing."""
    from linnet.nest.sources import cached_source, find_card

    found = cached_source(find_card(name), note)
    if not found:
        raise SourceError(f"{name} is not on this machine; run: linnet nest fetch {name}")
    print(found[1])


def verify(name: NameArgument) -> None:
    """Hash a model's files again; exit status 1 when they are not what they should be."""
    from linnet.nest.sources import find_card, verify_card

    source, where, unknown = verify_card(find_card(name), note)
    for file in unknown:
        note(f"{file} has no hash to check it by")
    print(f"{where}: as {source} should be")


def random(
    name: NameArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, f32 or f16.")] = "bf16",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of a file at most, such as 500MB or 2GB.")
    ] = "4GB",
) -> None:
    """Write a checkpoint of random weights in a model's shape, without a tokenizer."""
    from linnet.nest.random import write_random
    from linnet.nest.sources import find_card

    card = find_card(name)
    with typer.progressbar(length=1000, label=f"{name}, random", file=sys.stderr) as bar:
        write_random(
            card.config,
            output,
            seed=seed,
            dtype=dtype,
            max_shard_bytes=_bytes(max_shard_size),
            progress=lambda done, total: bar.update(done * 1000 // total - bar.pos),
        )
    note("the weights are random, and there is no tokenizer: prompts are token ids")
    print(output)


def _describe(card: "Card") -> dict[str, Any]:
    """A card as plain values, with what of it is on this machine."""
    from dataclasses import asdict

    from linnet.nest.sources import cached_source

    found = cached_source(card, note)
    cached = {"kind": _kind(found[0]), "path": str(found[1])} if found else None
    sources = [{"kind": _kind(source)} | asdict(source) for source in card.sources]
    return asdict(card) | {"sources": sources, "cached": cached}


def _kind(source: "Source") -> str:
    from linnet.nest.card import HubSource

    return "hub" if isinstance(source, HubSource) else "package"


def _source_line(source: dict[str, Any]) -> str:
    if source["kind"] == "hub":
        return f"hub {source['repo']}@{source['revision'] or 'main'}"
    return f"package {source['requirement']} ({source['note']})"


def _bytes(text: str) -> int:
    """A size as people write it: a number of bytes, kB, MB or GB (powers of 1000)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    size = int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is no size; write 500MB or 2GB", param_hint="SIZE")
    return size

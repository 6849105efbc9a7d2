"""``linnet bench MODEL``: speeds, each beside its distance from the reference.

``linnet bench setup NAME`` makes the environment of a peer.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main

from linnet.cli.output import note, print_json, print_table
from linnet.cli.run import ModelArgument, ThreadsOption
from linnet.errors import LinnetError

if TYPE_CHECKING:
    from linnet.bench.environments import Environment
    from linnet.plugins.descriptors import BenchMethod


def register(app: typer.Typer) -> None:
    """Add ``linnet bench``."""
    app.command("bench", cls=BenchCommand, epilog=EPILOG)(bench)


EPILOG = (
    "`linnet bench setup --list` shows the peers that are measured in environments of their own."
)


class BenchCommand(typer.core.TyperCommand):
    """``bench MODEL``, but ``bench setup`` is a command of its own; a folder is ``./setup``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Parse the arguments of whichever of the two it is."""
        if args[:1] != ["setup"]:
            return super().make_context(info_name, args, parent, **extra)
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command("setup")(setup)
        command = typer.main.get_command(app)
        return command.make_context(f"{info_name} setup", args[1:], parent, **extra)


def setup(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="An environment, or a method's key.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the environments.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Make it anew if it is ready.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the environment that a peer is measured in; it takes minutes and gigabytes."""
    from linnet.bench import environments as its
    from linnet.plugins.manager import plugin_manager

    if (name is None) != list_all:
        raise typer.BadParameter("give the NAME of an environment, or --list")
    manager = plugin_manager()
    if name is None:
        list_environments(list(its.environments(manager).values()), as_json)
        return
    environment = its.find_environment(manager, name)
    record = its.read_record(environment)
    if record is None or again or its.state(environment) != "ready":
        record = its.setup(environment, note)
    if as_json:
        print_json({"name": environment.name, "folder": environment.folder} | vars(record))
    else:
        print(f"{environment.name} is ready: {record.versions()}")


def list_environments(found: "list[Environment]", as_json: bool) -> None:
    """Each environment with what it holds, what runs in it, and whether it is there."""
    from linnet.bench.environments import state

    if as_json:
        print_json([{**vars(each), "folder": each.folder, "state": state(each)} for each in found])
        return
    print_table(
        ("NAME", "STATE", "METHODS", "PACKAGES"),
        [
            (each.name, state(each), ", ".join(each.methods), ", ".join(each.wanted))
            for each in found
        ],
    )


def bench(
    model: ModelArgument,
    methods: Annotated[
        str | None, typer.Option(help="Keys, separated by commas; all that are installed if left.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtypes, separated by commas; f32, bf16 and that of the model's own file if left."
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each run generates.")] = 128,
    runs: Annotated[int, typer.Option(help="Timed runs of each row.")] = 5,
    serving: Annotated[
        str | None,
        typer.Option(
            metavar="standard|small",
            help="The workload of the rows that serve many requests; small where there is no GPU.",
        ),
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Seconds that each step of a row may take.", min=1)
    ] = 900,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    threads: ThreadsOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Results as JSON; finished rows there are kept."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Time every method on the same tokens, each in a process of its own."""
    from linnet.bench.harness import Bench
    from linnet.bench.machine import has_gpu
    from linnet.plugins.benchmark import SERVING, Workload
    from linnet.runtime.threads import thread_budget

    workload = Workload(prompt_tokens=prompt_tokens, new_tokens=new_tokens, runs=runs, seed=seed)
    serving = serving or ("standard" if has_gpu() else "small")
    if serving not in SERVING:
        raise typer.BadParameter(f"--serving is {serving!r}; it is one of {', '.join(SERVING)}")

    def each(row: dict[str, Any]) -> None:
        note(f"{row['title']} {row['dtype']}: {row['error'] or summary(row)}")

    many = replace(SERVING[serving], seed=seed)
    found = find_methods(methods)
    benchmark = Bench(model, workload, thread_budget(threads), output, many, limit)
    dtypes = ["f32", "bf16", benchmark.encoding] if dtype is None else dtype.split(",")
    chosen = in_dtypes(found, dtypes)
    if benchmark.results["rows"]:
        note(f"{output} has {len(benchmark.results['rows'])} finished rows, which are kept")
    results = benchmark.run(chosen, each)
    if as_json:
        print_json(results)
    else:
        print_table(HEAD, [cells(row) for row in results["rows"]])


def find_methods(keys: str | None) -> list["BenchMethod"]:
    """The methods of keys that commas separate, or all that are installed."""
    from linnet.plugins.manager import plugin_manager

    manager = plugin_manager()
    if keys is None:
        return list(manager.bench_methods.values())
    return [manager.bench_method(key) for key in keys.split(",") if key]


def in_dtypes(
    methods: Sequence["BenchMethod"], dtypes: Sequence[str]
) -> list[tuple["BenchMethod", str]]:
    """Each method in each of the dtypes that it has.

    What a page compares is next to each other: a group's methods in one dtype, then in the next.
    A machine's speed changes within minutes, and a ratio should not.
    """
    dtypes = [name for name in dict.fromkeys(dtypes) if name]
    pairs = [
        (method, name)
        for group in dict.fromkeys(method.group for method in methods)
        for name in dtypes
        for method in methods
        if method.group == group and name in method.dtypes
    ]
    if not pairs:
        raise LinnetError(
            f"no method to measure in {', '.join(dtypes)}; see `linnet plugins list`, and install "
            'some with pip install "linnet[torch,hf]"'
        )
    return pairs


HEAD = (
    "method",
    "dtype",
    "first token ms",
    "decode tok/s",
    "of limit",
    "load s",
    "peak",
    "max abs",
    "top-1",
)


def summary(row: dict[str, Any]) -> str:
    """A row in a line."""
    _, _, first, decode, share, *_ = cells(row)
    of_limit = f", {share} of the bandwidth limit" if share else ""
    return f"first token {first} ms, {decode} tok/s{of_limit} (took {row['took_s']:.0f} s)"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table: medians, with the spread of the two that matter most.

    Of a row that serves many requests these are all requests' tokens, and the median first token.
    """
    metrics, distance = row["metrics"], row["distance"]
    if row["error"]:
        # The last column is printed as it comes: there a reason widens none of the others.
        return (row["title"], row["dtype"], *["-"] * (len(HEAD) - 3), row["error"])

    def spread(name: str, many: str, digits: int) -> str:
        found = metrics.get(name) or metrics.get(many)
        if found is None:
            return "-"
        low, high = (f"{found[end]:.{digits}f}" for end in ("min", "max"))
        return f"{found['median']:.{digits}f} ({low}-{high})"

    share = row["share_of_limit"]
    return (
        row["title"],
        row["dtype"],
        spread("ttft_ms", "serve_ttft_ms", 0),
        spread("decode_tok_s", "serve_tok_s", 1),
        "" if share is None else f"{share:.0%}",
        f"{metrics['load_s']['median']:.1f}",
        f"{metrics['peak_bytes']['median'] / 2**20:.0f} MiB",
        "" if distance is None else f"{distance['max_abs']:.2g}",
        "" if distance is None else f"{distance['top1']:.3f}",
    )

"""``linnet plugins``: what is installed, and whether it works."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linnet.cli.output import print_json, print_table

if TYPE_CHECKING:
    from linnet.plugins.discovery import FoundPlugin
    from linnet.plugins.doctor import Finding
    from linnet.plugins.manager import PluginManager

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON list.")]


def register(app: typer.Typer) -> None:
    """Add ``linnet plugins``."""
    group = typer.Typer(
        help="The installed plugins, and whether they work.",
        no_args_is_help=True,
    )
    group.command("list")(list_plugins)
    group.command("doctor")(doctor)
    app.add_typer(group, name="plugins")


def list_plugins(as_json: JsonOption = False) -> None:
    """List the plugins, their state and what they offer; imports no framework."""
    from linnet.plugins.manager import plugin_manager

    rows = describe_plugins(plugin_manager())
    if as_json:
        print_json(rows)
        return
    table = [
        (row["name"], row["state"], f"{row['distribution']} {row['version']}", _about(row))
        for row in rows
    ]
    print_table(("NAME", "STATE", "DISTRIBUTION", "OFFERS"), table)


def doctor(
    name: Annotated[
        str | None, typer.Argument(help="A plugin or a distribution; all when left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import what plugins describe, probe backends, show what is broken and where.

    Exit status 1 when something is broken. What is merely not installed, or cannot run on this
    machine, is not.
    """
    from linnet.plugins.doctor import Health, examine
    from linnet.plugins.manager import plugin_manager

    with redirect_stdout(sys.stderr):  # frameworks may print as they are imported
        findings = examine(plugin_manager(), name)
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            _print_finding(finding)
    if any(finding.health is Health.BROKEN for finding in findings):
        raise typer.Exit(1)


def describe_plugins(manager: "PluginManager") -> list[dict[str, Any]]:
    """Every plugin by name: state, origin, and what it offers by kind."""
    from linnet.plugins.discovery import one_line
    from linnet.plugins.registration import KINDS

    rows = []
    for plugin in manager.plugins:
        offers: dict[str, list[str]] = {}
        for descriptor in plugin.offers:
            offers.setdefault(KINDS[type(descriptor)], []).append(descriptor.name)
        rows.append(_row(plugin.found, "ok", offers=offers))
    for broken in manager.broken:
        rows.append(_row(broken.found, "broken", stage=broken.stage, error=one_line(broken.error)))
    rows += [_row(found, "disabled") for found in manager.disabled]
    return sorted(rows, key=lambda row: (row["name"], row["distribution"]))


def _about(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return f"at stage {row['stage']}: {row['error']}"
    return "; ".join(f"{kind} {', '.join(names)}" for kind, names in row["offers"].items())


def _row(
    found: "FoundPlugin",
    state: str,
    *,
    offers: dict[str, list[str]] | None = None,
    stage: str | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    return {
        "name": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "state": state,
        "offers": offers or {},
        "stage": stage,
        "error": error,
    }


def _print_finding(finding: "Finding") -> None:
    print(f"{finding.plugin.name}: {finding.subject}: {finding.health}")
    for line in (finding.traceback or finding.detail).splitlines():
        print(f"    {line}")

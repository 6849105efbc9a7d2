"""The ``linnet`` command: it collects the commands and turns their errors into exit statuses.

Each command is a module ``linnet.cli.NAME`` with one function, ``register(app)``, that adds the
command, or the group of commands, to the app::

    def register(app: typer.Typer) -> None:
        app.command("run")(run)                      # one command
        group = typer.Typer(help="Model cards and their files.", no_args_is_help=True)
        group.command("list")(list_cards)            # or a group of them
        app.add_typer(group, name="nest")

Every one of these modules is imported for ``linnet --help``, so at its top it imports the standard
library, ``typer``, ``linnet.errors`` and modules of ``linnet.cli``, and nothing else: what does
the work is imported inside the function that does it. A test holds this.

A command prints its result on stdout and everything else (notes, progress) on stderr; its
``--json`` prints one JSON value and nothing else. It raises ``LinnetError`` for a failure, which
is printed here as one message with exit status 1, and ``typer.BadParameter`` for wrong usage,
status 2. An interrupt is status 130.
"""

import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from typing import Annotated

import typer

from linnet.cli.output import note
from linnet.errors import LinnetError

COMMANDS = ("run", "chat", "inspect", "check", "export", "bench", "page", "plugins", "nest")
"""The modules of ``linnet.cli`` that hold commands, in the order of ``linnet --help``."""


def build_app() -> typer.Typer:
    """The app with every command registered."""
    # Plain text, not rich's boxes: it reads the same in a pipe, a narrow terminal and a screen
    # reader, and importing rich would cost more than all the rest of --help.
    app = typer.Typer(
        help="A model's architecture written once: run it, export it, measure it.",
        no_args_is_help=True,
        invoke_without_command=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(main_options)
    for name in COMMANDS:
        import_module(f"linnet.cli.{name}").register(app)
    return app


def main_options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    strict_plugins: Annotated[
        bool, typer.Option("--strict-plugins", help="Stop with status 2 at a broken plugin.")
    ] = False,
) -> None:
    """A model's architecture written once: run it, export it, measure it."""
    broken = report_broken_plugins()
    if broken and strict_plugins:
        raise typer.Exit(2)
    if version:
        from linnet import __version__

        typer.echo(f"linnet {__version__}")
    elif context.invoked_subcommand is None:
        context.fail("Missing command.")


def report_broken_plugins() -> int:
    """Load the plugins, with a line on stderr for each broken one; how many there are."""
    from linnet.plugins.manager import plugin_manager

    with redirect_stdout(sys.stderr):  # a plugin that prints as it is imported spoils no --json
        manager = plugin_manager()
    for plugin in manager.broken:
        note(f"warning: {plugin}")
    return len(manager.broken)


def main() -> int:
    """Run the command line of this process; the exit status."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character the terminal lacks is no failure
    try:
        build_app()(prog_name="linnet")
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except LinnetError as error:
        note(f"error: {error}")
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 1
    except OSError as error:
        note(f"error: {error.filename or 'output'}: {error.strerror or error}")
        status = 1
    try:
        sys.stdout.flush()
    except OSError:
        # The reader has gone: nothing is left to say, and Python would try again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

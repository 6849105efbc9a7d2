"""``linnet chat MODEL``: a conversation, one line at a time."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from linnet.cli.output import note
from linnet.cli.run import (
    BackendOption,
    DeviceOption,
    DtypeOption,
    MaxSeqOption,
    MinPOption,
    ModelArgument,
    ModeOption,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    VerboseOption,
    check_options,
    tell_granted,
    tell_speed,
)
from linnet.errors import RequestError

if TYPE_CHECKING:
    from linnet.runtime.model import Stream

HELP = "/reset forgets the conversation, /exit or end of input leaves, Ctrl-C stops an answer"


def register(app: typer.Typer) -> None:
    """Add ``linnet chat``."""
    app.command("chat")(chat)


def chat(
    model: ModelArgument,
    backend: BackendOption = None,
    mode: ModeOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    max_seq: MaxSeqOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="An answer's longest length.")] = 512,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    system: SystemOption = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Talk with a model: /reset forgets, /exit leaves, Ctrl-C stops an answer.

    The model must have a chat template. Messages may also come from a pipe, one a line.
    """
    from linnet.runtime.load import load
    from linnet.runtime.sampling import SamplingFields

    options = SamplingFields(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
    )
    check_options(options)
    with load(
        model,
        backend=backend,
        mode=mode,
        dtype=dtype,
        device=device,
        max_seq=max_seq,
        threads=threads,
        report=note,
    ) as loaded:
        if not loaded.tokenizer.has_chat_template:
            raise RequestError(
                f"{model} has no chat template; continue plain text with "
                f"`linnet run {model} PROMPT --raw`"
            )
        if verbose:
            tell_granted(loaded)
        if sys.stdin.isatty():
            note(HELP)
        opening = [] if system is None else [{"role": "system", "content": system}]
        messages = list(opening)
        while (line := _read_line()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(opening)
                continue
            if not line:
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                stream = loaded.chat_stream(asked, reuse_prefix=True, **options)
                answer = _print_answer(stream, verbose)
            except RequestError as error:
                note(f"error: {error}\n/reset starts a new conversation")
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """The next message, None at the end of input; an interrupt clears the line."""
    tty = sys.stdin.isatty()
    while True:
        try:
            if tty:
                return input("> ").strip()
            line = sys.stdin.readline()
            return line.strip() if line else None
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not tty:
                raise
            print()


def _print_answer(stream: "Stream", verbose: bool) -> str:
    """Print an answer as it comes; its text, as far as it got if it was interrupted."""
    parts: list[str] = []
    with stream:
        try:
            for text in stream:
                parts.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()
            print()
            if verbose:
                tell_speed(stream.generation)
        except KeyboardInterrupt:
            print()
            note("stopped")
    return "".join(parts)

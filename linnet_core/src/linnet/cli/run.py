"""``linnet run MODEL PROMPT``: one answer, as it comes."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from linnet.cli.output import note, print_json
from linnet.errors import RequestError

if TYPE_CHECKING:
    from linnet.runtime.generate import Generation
    from linnet.runtime.model import Model, Stream
    from linnet.runtime.sampling import SamplingFields

MODEL_HELP = "A Nest name, a folder, a GGUF file or a Hub repository."

ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
BackendOption = Annotated[
    str | None, typer.Option(help="Which backend runs it; the best one installed when left out.")
]
ModeOption = Annotated[str | None, typer.Option(help="A mode of the backend.")]
DtypeOption = Annotated[str | None, typer.Option(help="f32, bf16 or f16.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
MaxSeqOption = Annotated[
    int | None,
    typer.Option(help="Positions of the cache; the model's own, up to 2048, when left out."),
]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopKOption = Annotated[int, typer.Option(help="Choose among this many tokens; 0 is off.")]
TopPOption = Annotated[float, typer.Option(help="Choose among this much probability; 1 is off.")]
MinPOption = Annotated[
    float, typer.Option(help="Leave out what is less likely than this share; 0 is off.")
]
SeedOption = Annotated[
    int | None, typer.Option(help="For the same answer twice; drawn when left out.")
]
StopOption = Annotated[
    list[str] | None, typer.Option(help="A text that ends the answer; may be given again.")
]
SystemOption = Annotated[str | None, typer.Option(help="The system message.")]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads; what affinity and container allow when left out.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say what was granted, and how fast it was.")
]


def register(app: typer.Typer) -> None:
    """Add ``linnet run``."""
    app.command("run")(run)


def run(
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="- reads it from standard input.")
    ],
    backend: BackendOption = None,
    mode: ModeOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    max_seq: MaxSeqOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="The answer's longest length.")] = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False,
    system: SystemOption = None,
    threads: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Answer a prompt.

    With a chat template the prompt is a user's message; without one, or with --raw, it is
    continued as it is. Greedy unless --temperature says otherwise.
    """
    from linnet.runtime.load import load
    from linnet.runtime.sampling import SamplingFields

    if prompt == "-" and sys.stdin is None:
        raise typer.BadParameter("standard input is closed")
    text = sys.stdin.read() if prompt == "-" else prompt
    options = SamplingFields(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
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
        if verbose:
            tell_granted(loaded)
        chat = loaded.tokenizer.has_chat_template and not raw
        if system is not None and not chat:
            raise typer.BadParameter("--system needs a chat template, and none is in use")
        if chat:
            messages = [{"role": "user", "content": text}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            stream = loaded.chat_stream(messages, **options)
        else:
            stream = loaded.stream(text, **options)
        result = print_stream(stream, silent=as_json)
        if as_json:
            print_json({**summary(result), "granted": loaded.granted, "notes": loaded.notes})
        if verbose:
            tell_speed(result)


def check_options(options: "SamplingFields") -> None:
    """Refuse wrong options as wrong usage, before a model is loaded for them."""
    from linnet.runtime.sampling import sampling_options

    try:
        sampling_options(options)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error


def print_stream(stream: "Stream", *, silent: bool = False) -> "Generation":
    """Print text as it comes, and a line end at the end; the whole result."""
    with stream:
        for text in stream:
            if not silent:
                sys.stdout.write(text)
                sys.stdout.flush()
        if not silent:
            print()
        return stream.generation


def summary(result: "Generation") -> dict[str, object]:
    """What ``--json`` says of a result."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish": result.finish,
        "stopped_by": result.stopped_by,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "seed": result.seed,
        "timings": {
            "first_token_s": result.first_token_s,
            "total_s": result.total_s,
            "decode_tok_s": result.decode_tok_s,
        },
    }


def tell_granted(model: "Model") -> None:
    """Say on stderr what runs, and what there is to know about it."""
    granted = model.granted
    note(
        f"{granted.backend} {granted.mode}, {granted.dtype} on {granted.device}, "
        f"{granted.threads} threads, context {granted.max_seq}"
    )
    for line in model.notes:
        note(f"note: {line}")
    suggested = model.bound.checkpoint.text.generation_config or {}
    named = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in suggested]
    if named and suggested.get("do_sample"):
        values = ", ".join(f"{name} {suggested[name]}" for name in named)
        note(f"note: the checkpoint suggests {values}; not applied unless you ask for it")


def tell_speed(result: "Generation") -> None:
    """Say on stderr how fast it was."""
    rate = "" if result.decode_tok_s is None else f", then {result.decode_tok_s:.1f} tokens/s"
    note(
        f"{result.prompt_tokens} prompt tokens, first token after "
        f"{result.first_token_s * 1000:.0f} ms{rate}; {result.new_tokens} new tokens, "
        f"finish {result.finish}"
    )

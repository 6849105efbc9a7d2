"""The generation loop: prompts in, tokens and text out, on a session with a few cache rows.

A prompt takes a free row (``extend``), all rows then step together (``decode``), and a row that
ends makes room for the next prompt. Tokens are chosen inside the program. Knows nothing of
backends, checkpoints or chat.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from linnet.errors import RequestError
from linnet.runtime.sampling import SamplingOptions
from linnet.runtime.stream import Detokenizer, StopMatcher

if TYPE_CHECKING:
    from linnet.plugins.interfaces import Session
    from linnet.runtime.tokenizer import EndIds, Tokenizer
    from linnet.weights.checkpoint import Array

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Generation:
    """What came of one prompt; as a string, its text."""

    text: str
    """The answer, without end-of-text tokens and stop texts; empty without a tokenizer."""
    tokens: tuple[int, ...]
    """Every token that was generated, those of the end mark or stop text included."""
    finish: Finish
    """``stop``: an end-of-text token or a stop text; ``length``: no more was asked for or fits."""
    prompt_tokens: int
    seed: int | None
    """What the choice was seeded with; None when it was greedy."""
    stopped_by: str | int | None = None
    """The stop text or the end-of-text token id."""
    reused_tokens: int = 0
    """How many of the prompt's tokens were in the cache already."""
    first_token_s: float = field(default=0.0, compare=False)
    """Seconds from the start to the first token."""
    total_s: float = field(default=0.0, compare=False)
    """Seconds from the start to the last token."""

    def __str__(self) -> str:
        return self.text

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first one, None when there was only one."""
        seconds = self.total_s - self.first_token_s
        return (self.new_tokens - 1) / seconds if self.new_tokens > 1 and seconds > 0 else None


@dataclass(frozen=True)
class Event:
    """Something happened to prompt number ``index``: new text, or its end."""

    index: int
    text: str
    generation: Generation | None = None


class RowCache:
    """What each cache row of a session holds: the tokens whose keys and values are in it."""

    def __init__(self, rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def take(self, free: set[int], prompt: Sequence[int], *, reuse: bool) -> tuple[int, int]:
        """The free row that ``prompt`` should take, and how much of it is there already.

        At least one token is always left to compute: its logits are what comes next.
        """
        if not reuse:
            return min(free), 0
        shared = {row: _common(self.tokens[row], prompt) for row in free}
        row = max(sorted(free), key=lambda row: shared[row])
        return row, min(shared[row], len(prompt) - 1)


def check_prompt(prompt: Sequence[int], *, vocab: int, max_seq: int) -> None:
    """Raises RequestError for an empty prompt, ids out of range, or no room for a new token."""
    if not prompt:
        raise RequestError("the prompt is empty: it has no tokens")
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise RequestError(
                f"prompt token {position} is {token!r}; token ids of this model are whole numbers "
                f"from 0 to {vocab - 1}"
            )
    if len(prompt) >= max_seq:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and the context {max_seq}, with no room for an "
            "answer; shorten the prompt, or load with a larger max_seq (`--max-seq`)"
        )


def generate(
    session: "Session",
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    vocab: int,
    cache: RowCache,
    tokenizer: "Tokenizer | None" = None,
    end_ids: "EndIds | None" = None,
    reuse_prefix: bool = False,
) -> Iterator[Event]:
    """Generate for every prompt; the iterator runs the session, and gives text as it comes.

    All prompts are checked at once, before any work. A prompt that fits, but not with
    ``max_new_tokens``, gets what fits and ends with ``length``. Every prompt is sampled as if it
    were alone, so the same prompt twice gives the same answer twice. ``reuse_prefix`` skips
    tokens that a row holds already from an earlier call.
    """
    max_seq = session.granted.max_seq
    for prompt in prompts:
        check_prompt(prompt, vocab=vocab, max_seq=max_seq)
    if options.stop and tokenizer is None:
        raise RequestError("stop texts need a tokenizer, and this checkpoint has none")
    ends = {} if options.ignore_eos else end_ids or {}
    return _events(
        session, prompts, _Choice.of(options), cache, tokenizer, ends, reuse_prefix=reuse_prefix
    )


def _events(
    session: "Session",
    prompts: Sequence[Sequence[int]],
    choice: "_Choice",
    cache: RowCache,
    tokenizer: "Tokenizer | None",
    ends: "EndIds",
    *,
    reuse_prefix: bool,
) -> Iterator[Event]:
    max_seq, options = session.granted.max_seq, choice.options
    waiting = list(enumerate(prompts))[::-1]
    free = set(range(session.granted.rows))
    running: dict[int, _Running] = {}
    while waiting or running:
        batch: dict[int, _Running] = {}
        while waiting and free:
            index, prompt = waiting.pop()
            row, reused = cache.take(free, prompt, reuse=reuse_prefix)
            free.remove(row)
            room = min(max_seq - len(prompt), options.max_new_tokens or max_seq)
            output = None if tokenizer is None else Detokenizer(tokenizer)
            stops = StopMatcher(options.stop)
            batch[row] = _Running(index, prompt, reused, room, choice.seed, ends, output, stops)
        running |= batch
        if batch:
            chosen = _extend(session, batch, cache, choice)
        else:
            chosen = _decode(session, running, cache, choice)
        for row, token in chosen.items():
            event = running[row].push(token)
            if event.generation is not None:
                del running[row]
                free.add(row)
            if event.text or event.generation is not None:
                yield event


@dataclass
class _Running:
    """One prompt on its row, and what came of it so far."""

    index: int
    prompt: Sequence[int]
    reused: int
    room: int
    seed: int | None
    ends: "EndIds"
    detokenizer: Detokenizer | None
    stops: StopMatcher
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0

    @property
    def position(self) -> int:
        """Where the newest token goes in the cache."""
        return len(self.prompt) + len(self.tokens) - 1

    def push(self, token: int) -> Event:
        """Take the next token; an event with its text, and with the result if it was the last."""
        self.tokens.append(token)
        if len(self.tokens) == 1:
            self.first = time.perf_counter() - self.started
        ended = token in self.ends
        last = ended or len(self.tokens) == self.room
        text = self._text(None if ended else token, last)
        self.text.append(text)
        if ended:
            return Event(self.index, text, self._generation("stop", token))
        if self.stops.matched is not None:
            return Event(self.index, text, self._generation("stop", self.stops.matched))
        return Event(self.index, text, self._generation("length", None) if last else None)

    def _text(self, token: int | None, last: bool) -> str:
        """The text that is certain now, and all of it when this was the last token."""
        if self.detokenizer is None:
            return ""
        text = "" if token is None else self.stops.feed(self.detokenizer.feed(token))
        if last and self.stops.matched is None:
            text += self.stops.feed(self.detokenizer.flush()) + self.stops.flush()
        return text

    def _generation(self, finish: Finish, stopped_by: str | int | None) -> Generation:
        return Generation(
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish=finish,
            prompt_tokens=len(self.prompt),
            seed=self.seed,
            stopped_by=stopped_by,
            reused_tokens=self.reused,
            first_token_s=self.first,
            total_s=time.perf_counter() - self.started,
        )


@dataclass(frozen=True)
class _Choice:
    """How every row of a call chooses: which entry, with which inputs beside the step's own."""

    options: SamplingOptions
    seed: int | None

    @classmethod
    def of(cls, options: SamplingOptions) -> "_Choice":
        if options.greedy:
            return cls(options, None)
        return cls(options, secrets.randbelow(2**31) if options.seed is None else options.seed)

    def run(self, session: "Session", step: str, inputs: "dict[str, Array]") -> "Array":
        """Run ``step`` and choose a token for each of its rows."""
        import numpy as np

        if self.seed is None:
            return session.run(f"{step}_greedy", inputs)
        rows = len(inputs["tokens"])
        asked = self.options
        return session.run(
            f"{step}_sample",
            {
                **inputs,
                "seeds": np.full(rows, self.seed, np.int32),
                "temperature": np.full(rows, asked.temperature, np.float32),
                "top_k": np.full(rows, asked.top_k, np.int32),
                "top_p": np.full(rows, asked.top_p, np.float32),
                "min_p": np.full(rows, asked.min_p, np.float32),
            },
        )


def _extend(
    session: "Session", batch: Mapping[int, _Running], cache: RowCache, choice: _Choice
) -> dict[int, int]:
    """Write the prompts of ``batch`` to their rows; the first new token of each, by row."""
    import numpy as np

    parts = [request.prompt[request.reused :] for request in batch.values()]
    tokens = np.zeros((len(batch), max(map(len, parts))), np.int32)
    for line, part in zip(tokens, parts, strict=True):
        line[: len(part)] = part
    for row, request in batch.items():  # should the step fail, only this much is certain
        del cache.tokens[row][request.reused :]
    inputs = {
        "tokens": tokens,
        "rows": np.array(list(batch), np.int32),
        "starts": np.array([request.reused for request in batch.values()], np.int32),
        "lengths": np.array([len(part) for part in parts], np.int32),
    }
    chosen = choice.run(session, "extend", inputs)
    for row, request in batch.items():
        cache.tokens[row] = list(request.prompt)
    return {row: int(token) for row, token in zip(batch, chosen, strict=True)}


def _decode(
    session: "Session", running: Mapping[int, _Running], cache: RowCache, choice: _Choice
) -> dict[int, int]:
    """One step of every running row; its next token, by row."""
    import numpy as np

    tokens = np.zeros(session.granted.rows, np.int32)
    positions = np.full(session.granted.rows, -1, np.int32)
    for row, request in running.items():
        tokens[row] = request.tokens[-1]
        positions[row] = request.position
    chosen = choice.run(session, "decode", {"tokens": tokens, "positions": positions})
    for row, request in running.items():
        cache.tokens[row].append(request.tokens[-1])
    return {row: int(chosen[row]) for row in running}


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens the two begin with in common."""
    count = 0
    for left, right in zip(held, prompt, strict=False):
        if left != right:
            break
        count += 1
    return count

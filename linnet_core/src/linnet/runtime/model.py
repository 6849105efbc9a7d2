"""A loaded model: text in, text out, in one call or as a stream, plain or as a chat.

``Model`` joins a bound model, the session that runs it and the checkpoint's tokenizer. It knows
no backend: which one runs, and what it granted, is in ``model.granted``.
"""

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, Unpack

from linnet.errors import CheckpointError, RequestError, UnavailableError
from linnet.plugins.descriptors import Capability
from linnet.runtime.generate import Event, Generation, RowCache, generate
from linnet.runtime.sampling import SamplingFields, sampling_options

if TYPE_CHECKING:
    from linnet.plugins.descriptors import Backend
    from linnet.plugins.interfaces import Granted, Session
    from linnet.runtime.chat import Message
    from linnet.runtime.tokenizer import EndIds, Tokenizer
    from linnet.weights.binding import BoundModel

Prompt = str | Sequence[int]
"""Plain text, or token ids as they are."""


class Model:
    """A model that generates. Made by ``linnet.load``; close it, or use it in a ``with`` block.

    One call runs at a time: a second one, from another thread or while a stream is not yet read
    to its end, raises RequestError.
    """

    def __init__(
        self,
        bound: "BoundModel",
        session: "Session",
        backend: "Backend",
        notes: Sequence[str] = (),
    ) -> None:
        self.bound = bound
        self.session = session
        self.backend = backend
        told = (*bound.checkpoint.notes, *bound.notes, *session.granted.notes, *notes)
        self.notes = tuple(dict.fromkeys(told))
        """What a user should be told: of the checkpoint, its config, and what was granted."""
        self._cache = RowCache(session.granted.rows)
        self._lock = threading.Lock()

    @property
    def granted(self) -> "Granted":
        """What runs: backend, mode, dtype, device, rows, context, threads."""
        return self.session.granted

    @property
    def describe(self) -> Mapping[str, Any]:
        """The typed config, for people."""
        return self.bound.describe

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """Raises CheckpointError when the checkpoint has none."""
        from linnet.runtime.tokenizer import Tokenizer

        checkpoint = self.bound.checkpoint
        return Tokenizer(checkpoint.text, {**checkpoint.config, "vocab_size": self.bound.vocab})

    @cached_property
    def end_ids(self) -> "EndIds":
        """Token ids that end a text, each with the files that say so."""
        from linnet.runtime.tokenizer import end_ids

        if self._tokenizer is not None:
            return self._tokenizer.end_ids
        checkpoint = self.bound.checkpoint
        return end_ids(checkpoint.text, checkpoint.config, vocab=self.bound.vocab)

    def generate(
        self, prompt: Prompt, *, reuse_prefix: bool = False, **options: Unpack[SamplingFields]
    ) -> Generation:
        """Continue a prompt.

        Text is tokenized with the tokenizer's own special tokens and without a chat template
        (``chat`` uses it). ``options`` are the fields of ``SamplingOptions``; greedy by default.
        ``reuse_prefix`` skips what the cache holds from an earlier call, and so makes the second
        of two prompts that begin alike start sooner.

        Raises RequestError for an option or a prompt that is not valid, or has no room.
        """
        with self.stream(prompt, reuse_prefix=reuse_prefix, **options) as stream:
            for _ in stream:
                pass
            return stream.generation

    def generate_many(
        self, prompts: Sequence[Prompt], **options: Unpack[SamplingFields]
    ) -> list[Generation]:
        """As ``generate`` for each prompt, as many at a time as there are cache rows."""
        results: dict[int, Generation] = {}
        for event in self._events([self._ids(prompt) for prompt in prompts], False, options):
            if event.generation is not None:
                results[event.index] = event.generation
        return [results[index] for index in range(len(prompts))]

    def stream(
        self, prompt: Prompt, *, reuse_prefix: bool = False, **options: Unpack[SamplingFields]
    ) -> "Stream":
        """As ``generate`` for one prompt, a piece of text at a time."""
        return Stream(self._events([self._ids(prompt)], reuse_prefix, options))

    def chat(
        self,
        messages: "Sequence[Message]",
        *,
        reuse_prefix: bool = False,
        **options: Unpack[SamplingFields],
    ) -> Generation:
        """Answer a conversation: ``[{"role": "user", "content": "Hi"}]``.

        Raises RequestError when the checkpoint has no chat template, or it refuses the messages.
        """
        return self.generate(self.chat_ids(messages), reuse_prefix=reuse_prefix, **options)

    def chat_stream(
        self,
        messages: "Sequence[Message]",
        *,
        reuse_prefix: bool = False,
        **options: Unpack[SamplingFields],
    ) -> "Stream":
        """As ``chat``, a piece of text at a time."""
        return self.stream(self.chat_ids(messages), reuse_prefix=reuse_prefix, **options)

    def chat_ids(self, messages: "Sequence[Message]") -> list[int]:
        """The token ids that ``chat`` answers: exactly those of Transformers' chat call."""
        return self.tokenizer.encode_chat(messages)

    def source(self) -> str:
        """The source that the backend generated. Raises UnavailableError where there is none."""
        source = self.session.source()
        if source is None:
            raise UnavailableError(f"the {self.granted.backend} backend generates no source")
        return source

    def close(self) -> None:
        """Free what the session holds."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        granted = self.granted
        return (
            f"<Model {self.bound.checkpoint.location.name}: {granted.backend} {granted.mode}, "
            f"{granted.dtype}, {granted.device}, {granted.rows} x {granted.max_seq}>"
        )

    @cached_property
    def _tokenizer(self) -> "Tokenizer | None":
        return None if self.bound.checkpoint.text.tokenizer is None else self.tokenizer

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt)
            except CheckpointError as error:
                raise RequestError(f"the prompt must be token ids: {error}") from error
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(f"a prompt is text or a list of token ids: {error}") from error

    def _events(
        self, prompts: Sequence[Sequence[int]], reuse_prefix: bool, options: SamplingFields
    ) -> Iterator[Event]:
        for capability in (Capability.CACHE, Capability.CHOICE):
            if capability not in self.backend.capabilities:
                raise UnavailableError(
                    f"the {self.backend.name} backend cannot generate: it does not have "
                    f"{capability.name} ({capability.value}); choose another with backend="
                )
        events = generate(
            self.session,
            prompts,
            sampling_options(options),
            vocab=self.bound.vocab,
            cache=self._cache,
            tokenizer=self._tokenizer,
            end_ids=self.end_ids,
            reuse_prefix=reuse_prefix,
        )
        return self._alone(events)

    def _alone(self, events: Iterator[Event]) -> Iterator[Event]:
        """The events, while no other call runs on this session."""
        if not self._lock.acquire(blocking=False):
            raise RequestError("the model is busy with another call; finish or close its stream")
        try:
            yield from events
        finally:
            self._lock.release()


class Stream:
    """Pieces of text as they come; afterwards ``generation`` says how it went.

    Close it, or leave its ``with`` block, to stop early.
    """

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for event in self._events:
            if event.generation is not None:
                self._generation = event.generation
            if event.text:
                return event.text
        raise StopIteration

    @property
    def generation(self) -> Generation:
        """The whole result. Raises RequestError before the stream was read to its end."""
        if self._generation is None:
            raise RequestError("the stream was not read to its end: there is no result yet")
        return self._generation

    def close(self) -> None:
        """Stop generating and let the next call run."""
        close = getattr(self._events, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

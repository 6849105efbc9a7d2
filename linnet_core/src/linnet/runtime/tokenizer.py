"""Text to token ids and back, with exactly the ids that Transformers 5 gives.

Special tokens come from ``tokenizer.json`` (its post-processor adds them) and names from
``tokenizer_config.json``; like Transformers, ``add_bos_token`` there is not consulted when there
is a ``tokenizer.json``. Knows nothing of models beyond ``config.json``'s token ids.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from linnet.errors import CheckpointError, ConfigError, LinnetError, RequestError
from linnet.runtime.chat import ChatTemplate, Message
from linnet.runtime.stream import fragment_bytes
from linnet.weights.checkpoint import TextFiles

if TYPE_CHECKING:
    import tokenizers

EndIds = Mapping[int, tuple[str, ...]]
"""Token ids that end a text, each with the files that say so."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Raises CheckpointError when the checkpoint has none, or one that cannot be read; ConfigError
    for end-of-text ids that are not in the vocabulary.
    """

    def __init__(self, text: TextFiles, config: Mapping[str, Any]) -> None:
        import tokenizers

        if text.tokenizer is None:
            raise CheckpointError(
                "the checkpoint has no tokenizer.json, so it takes and gives token ids only, from "
                "Python: `linnet.load(MODEL).generate([1, 2, 3]).tokens`"
            )
        with _told("tokenizer.json cannot be read"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text.tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = text.tokenizer_config or {}
        self.special_tokens = _named_tokens(settings)
        """Special tokens by name (``bos_token``), as chat templates see them."""
        if config.get("model_type") == "llama":
            _follow_llama_class(self._tokenizer, settings)
        _add_tokens(self._tokenizer, settings, self.special_tokens)
        self._tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens", False))

        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.end_ids = end_ids(
            text, config, vocab=config.get("vocab_size", self.vocab_size), token_id=self.token_id
        )
        self._template = text.chat_template
        self._pieces: dict[int, tuple[bytes, bytes]] = {}

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-text token as text, None when the checkpoint names none."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The end-of-text token as text; ``end_ids`` may have more."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_id(self) -> int | None:
        """The id of ``bos_token``."""
        return None if self.bos_token is None else self.token_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        """The id of ``eos_token``."""
        return None if self.eos_token is None else self.token_id(self.eos_token)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works."""
        return self._template is not None

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added ones included: for exporters."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def added_tokens(self) -> "dict[int, tokenizers.AddedToken]":
        """Tokens matched in text as they are, by id, with their flags: for exporters."""
        return dict(self._tokenizer.get_added_tokens_decoder())

    def token_id(self, token: str) -> int | None:
        """The id of a token spelled as in the vocabulary, None when it is not there."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds by itself."""
        with _told("tokenizer.json fails on this text"):
            try:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            except TypeError as error:
                message = f"the prompt is not text that UTF-8 can hold: {error}"
                raise RequestError(message) from error
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, as Transformers gives it."""
        with _told("tokenizer.json fails on these token ids"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        The template wrote the special tokens, so none are added here: these are the ids of
        Transformers' ``apply_chat_template``. Raises RequestError as ``render_chat`` does.
        """
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """The text of a conversation; see ``ChatTemplate.render``."""
        return self._chat_template.render(messages, **variables)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise RequestError(
                "the checkpoint has no chat template; give it plain text "
                "(`linnet run MODEL PROMPT --raw`, `model.generate(text)`)"
            )
        return ChatTemplate(self._template, self.special_tokens)

    def pieces(self, token: int) -> tuple[bytes, bytes]:
        """The UTF-8 bytes that a token adds to a text: as its first token, and later in it.

        Nothing for special tokens and for ids that the tokenizer does not have.
        """
        if token not in self._pieces:
            self._pieces[token] = self._find_pieces(token)
        return self._pieces[token]

    def _find_pieces(self, token: int) -> tuple[bytes, bytes]:
        spelling = self._tokenizer.id_to_token(token) if token >= 0 else None
        if spelling is None or token in self._special_ids:
            return b"", b""
        alone = self.decode([token], skip_special=False)
        if "\ufffd" in alone and self._decoder_types & {"ByteLevel", "ByteFallback"}:
            byte_level = "ByteLevel" in self._decoder_types
            fragment = fragment_bytes(spelling, byte_level=byte_level)
            if fragment is not None:
                return fragment, fragment
        later = self.decode([token, token], skip_special=False)[len(alone) :]
        return alone.encode(), later.encode()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def _decoder_types(self) -> frozenset[str]:
        decoder = self._tokenizer.decoder
        if decoder is None:
            return frozenset()
        return frozenset(_types(json.loads(decoder.__getstate__())))


def end_ids(
    text: TextFiles,
    config: Mapping[str, Any],
    *,
    vocab: int,
    token_id: Callable[[str], int | None] = lambda token: None,
) -> EndIds:
    """Every token id that ends a text: what any of the three files says, with who said it.

    Raises ConfigError for one that is not a token id of this vocabulary.
    """
    sources: dict[int, tuple[str, ...]] = {}

    def add(value: Any, source: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
            raise ConfigError(
                f"{source} has {value!r}, which is not a token id: the vocabulary has {vocab}"
            )
        if source not in sources.get(value, ()):
            sources[value] = (*sources.get(value, ()), source)

    for file, content in (("config", config), ("generation_config", text.generation_config or {})):
        value = content.get("eos_token_id")
        if value is not None:
            for item in value if isinstance(value, list | tuple) else [value]:
                add(item, f"{file}.eos_token_id")
    spelling = _named_tokens(text.tokenizer_config or {}).get("eos_token")
    if spelling is not None and (found := token_id(spelling)) is not None:
        add(found, "tokenizer_config.eos_token")
    return sources


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``*_token`` entries of ``tokenizer_config.json``, as text."""
    extra = settings.get("extra_special_tokens")
    named = {**settings, **extra} if isinstance(extra, Mapping) else settings
    tokens = {}
    for name, value in named.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str) and (name.endswith("_token") or name not in settings):
            tokens[name] = content
    return tokens


def _add_tokens(
    tokenizer: "tokenizers.Tokenizer", settings: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add what ``tokenizer_config.json`` lists: its ``added_tokens_decoder``, then special tokens.

    Raises CheckpointError when the two files give one token two ids, and for what is no token.
    """
    from tokenizers import AddedToken

    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder is {short(listed)}, not an object"
        )
    for index, entry in listed.items():
        if not (index.isdecimal() and len(index) < 10 and isinstance(entry, Mapping)):
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder has {short(index)}: {short(entry)}, "
                "which is not a token by its id"
            )
        _content(entry)
    for index, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {key: bool(value) for key, value in entry.items() if key in _FLAGS}
        tokenizer.add_tokens([AddedToken(entry["content"], **flags)])
        found = tokenizer.token_to_id(entry["content"])
        if found != int(index):
            raise CheckpointError(
                f"the token {entry['content']!r} has id {index} in tokenizer_config.json "
                f"and {found} in tokenizer.json"
            )
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    spelled = [_content(token) for token in extra] if isinstance(extra, list) else []
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [text for text in (*named.values(), *spelled) if text not in known]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in dict.fromkeys(missing)])


_FLAGS = {"special", "normalized", "lstrip", "rstrip", "single_word"}


def _content(token: Any) -> str:
    """A token's text, given alone or with flags beside it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise CheckpointError(
            f"tokenizer_config.json lists the token {short(token)}, which has no text"
        )
    return content


@contextmanager
def _told(what: str) -> Iterator[None]:
    """The library's failures as CheckpointError.

    It raises bare Exception, and where it panics something that is not even that.
    """
    try:
        yield
    except (LinnetError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {error}") from error


def _follow_llama_class(tokenizer: "tokenizers.Tokenizer", settings: Mapping[str, Any]) -> None:
    """Do what Transformers' ``LlamaTokenizer`` does to a SentencePiece-like ``tokenizer.json``.

    It keeps the vocabulary and the post-processor and replaces the rest, so that only the start of
    a text gets a leading space, not every text after a special token, unless ``legacy`` is set.
    """
    from tokenizers import decoders, models, pre_tokenizers

    name = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    model = tokenizer.model
    byte_level = tokenizer.decoder is not None and "ByteLevel" in str(tokenizer.decoder)
    if name != "LlamaTokenizer" or byte_level or not isinstance(model, models.BPE):
        return
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if settings.get("legacy", False) else "first"
    model.byte_fallback = True
    model.fuse_unk = True
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if prefix else steps
    )


def _types(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield str(decoder.get("type"))
    for inner in decoder.get("decoders", ()):
        yield from _types(inner)

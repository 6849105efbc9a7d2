"""The text side of a GGUF file as the content of Transformers' files.

Two kinds of vocabulary are read: ``gpt2``, byte-level BPE with merges, and ``llama``, SentencePiece
BPE with scores. Knows nothing of models beyond how many rows the embedding has.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from linnet.weights.checkpoint import TextFiles
from linnet_gguf.metadata import Metadata, shown
from linnet_gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

PREFIX = "tokenizer.ggml."
SPACE = "▁"
MAX_PIECE = 512
"""Characters of a SentencePiece token: finding its merges takes time in their square."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Transformers' name of a special token, and GGUF's."""
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Every id that ends a text: of the text, of a turn, of a message."""
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""End-of-turn marks that llama.cpp goes by in files that state no ``eot_token_id``."""


class TokenType(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id with their types. Filler rows, which no tokenizer has, are left out."""

    tokens: Mapping[int, str]
    types: Mapping[int, TokenType]

    def ids(self) -> dict[str, int]:
        """The vocabulary as ``tokenizer.json`` has it."""
        return {token: index for index, token in self.tokens.items()}

    def added(self) -> list[dict[str, Any]]:
        """Tokens matched in text as they are: control tokens (special) and user-defined ones."""
        special = {TokenType.CONTROL, TokenType.UNKNOWN}
        return [
            {
                "id": index,
                "content": self.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind in special,
            }
            for index, kind in self.types.items()
            if kind in special or kind is TokenType.USER_DEFINED
        ]


def read_text(
    meta: Metadata, config: Mapping[str, Any]
) -> tuple[TextFiles, dict[str, Any], tuple[str, ...]]:
    """The text files, the token ids that belong in ``config.json``, and notes.

    Raises CheckpointError for a tokenizer that would not give the right ids.
    """
    kind = meta.optional(f"{PREFIX}model", str)
    if kind is None or kind in ("none", "no_vocab"):
        return TextFiles(), {}, ("the file has no tokenizer: it takes and gives token ids only",)
    if kind not in ("gpt2", "llama"):
        raise meta.error(
            f"{PREFIX}model is {kind!r}; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE)"
        )
    vocabulary = _vocabulary(meta, int(config["vocab_size"]))
    ids = _special_ids(meta, vocabulary)
    if kind == "gpt2":
        pre = _pre_tokenizer(meta)
        prefix = meta.optional(f"{PREFIX}add_space_prefix", bool) or False
        adds_bos, adds_eos = _adds(meta, ids, bos=pre.adds_bos)
        parts = _byte_level(meta, vocabulary, pre, prefix)
        tokenizer_class = "PreTrainedTokenizerFast"
    else:
        prefix = meta.optional(f"{PREFIX}add_space_prefix", bool) is not False
        adds_bos, adds_eos = _adds(meta, ids, bos=True)
        parts = _sentence_piece(meta, vocabulary, ids, prefix)
        is_llama = config["model_type"] == "llama"
        tokenizer_class = "LlamaTokenizer" if is_llama else "PreTrainedTokenizerFast"
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "post_processor": _post_processor(vocabulary, ids, adds_bos, adds_eos),
        **parts,
    }
    template = meta.optional("tokenizer.chat_template", str)
    ends, notes = _ends(meta, vocabulary, template)
    settings: dict[str, Any] = {
        "tokenizer_class": tokenizer_class,
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "add_prefix_space": prefix,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("max_position_embeddings") or config["n_positions"],
        **{f"{role}_token": vocabulary.tokens[index] for role, index in ids.items()},
    }
    if template is not None:
        settings["chat_template"] = template
    special = {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad") if role in ids}
    text = TextFiles(
        tokenizer=json.dumps(tokenizer, ensure_ascii=False),
        tokenizer_config=settings,
        generation_config={**special, "eos_token_id": ends} if ends else special,
        chat_template=template,
    )
    # Stated where there is none: some classes of Transformers have a default of their own.
    return text, {"pad_token_id": None, **special}, notes


def _vocabulary(meta: Metadata, rows: int) -> Vocabulary:
    tokens = meta.strings(f"{PREFIX}tokens")
    types = meta.numbers(f"{PREFIX}token_type")
    if not tokens or types is None:
        missing = "tokens" if not tokens else "token_type"
        raise meta.error(f"does not have the metadata key {PREFIX}{missing}: convert it again")
    if len(types) != len(tokens):
        raise meta.error(f"has {len(tokens)} tokens and {len(types)} token types")
    if len(tokens) > rows:
        raise meta.error(
            f"has {len(tokens)} tokens, but token_embd.weight has {rows} rows: the tokenizer is "
            "not this model's"
        )
    known = {kind.value: kind for kind in TokenType}
    kept: dict[int, str] = {}
    kinds: dict[int, TokenType] = {}
    for index, (token, number) in enumerate(zip(tokens, types.tolist(), strict=True)):
        kind = known.get(number)
        if kind is None:
            raise meta.error(f"the token {index} ({shown(token)}) has the type {number}")
        if kind is not TokenType.UNUSED or token != f"[PAD{index}]":
            kept[index], kinds[index] = token, kind
    if not kept:
        raise meta.error(f"has {len(tokens)} tokens, all of them filler")
    if len(set(kept.values())) != len(kept):
        twice = next(token for token, count in Counter(kept.values()).items() if count > 1)
        raise meta.error(f"has the token {shown(twice)} twice, which a tokenizer.json cannot say")
    return Vocabulary(kept, kinds)


def _special_ids(meta: Metadata, vocabulary: Vocabulary) -> dict[str, int]:
    ids = {}
    for role, name in ROLES.items():
        index = _token_id(meta, f"{name}_token_id", vocabulary)
        if index is not None:
            ids[role] = index
    return ids


def _token_id(meta: Metadata, name: str, vocabulary: Vocabulary) -> int | None:
    index = meta.optional(f"{PREFIX}{name}", int)
    if index is not None and index not in vocabulary.tokens:
        raise meta.error(f"{PREFIX}{name} is {index}, which is not a token")
    return index


def _adds(meta: Metadata, ids: Mapping[str, int], *, bos: bool) -> tuple[bool, bool]:
    """Whether text gets a first and a last token; ``bos`` is llama.cpp's rule if unstated."""
    stated = meta.optional(f"{PREFIX}add_bos_token", bool)
    adds_bos = bos if stated is None else stated
    adds_eos = meta.optional(f"{PREFIX}add_eos_token", bool) or False
    for role, adds in (("bos", adds_bos), ("eos", adds_eos)):
        if adds and role not in ids:
            raise meta.error(
                f"adds the {role} token to every text, but has no {PREFIX}{role}_token_id"
            )
    return adds_bos, adds_eos


def _ends(
    meta: Metadata, vocabulary: Vocabulary, template: str | None
) -> tuple[list[int], tuple[str, ...]]:
    """Every id that ends a text, and a note if one of them is not stated but recognised."""
    stated = {key: _token_id(meta, key, vocabulary) for key in END_KEYS}
    ends = {index for index in stated.values() if index is not None}
    notes = []
    if stated["eot_token_id"] is None and template is not None:
        for index, token in vocabulary.tokens.items():
            control = vocabulary.types[index] is TokenType.CONTROL
            if control and token in TURN_ENDS and token in template and index not in ends:
                ends.add(index)
                notes.append(
                    f"the file does not state {PREFIX}eot_token_id; {token} ({index}) ends a "
                    "turn in its chat template, so it ends an answer"
                )
    return sorted(ends), tuple(notes)


def _pre_tokenizer(meta: Metadata) -> PreTokenizer:
    key = f"{PREFIX}pre"
    name = meta.optional(key, str)
    known = ", ".join(PRE_TOKENIZERS)
    advice = "use a safetensors checkpoint of this model, whose tokenizer.json states its rule"
    if name is None:
        raise meta.error(
            f"does not state {key}, how text is split before merging, so its token ids cannot be "
            f"told: convert the model again with a current llama.cpp, or {advice}"
        )
    if name not in PRE_TOKENIZERS:
        raise meta.error(f"{key} is {name!r}; the rules known here are {known}: {advice}")
    return PRE_TOKENIZERS[name]


def _byte_level(
    meta: Metadata, vocabulary: Vocabulary, pre: PreTokenizer, prefix: bool
) -> dict[str, Any]:
    merges = meta.strings(f"{PREFIX}merges")
    if merges is None:
        raise meta.error(f"does not have the metadata key {PREFIX}merges: convert it again")
    ids = vocabulary.ids()
    pairs = []
    for merge in merges:
        # A first character may be a space of its own; the separator is the next one.
        left, _, right = merge[1:].partition(" ")
        pair = (merge[:1] + left, right)
        if pair[0] not in ids or right not in ids or pair[0] + right not in ids:
            raise meta.error(f"the merge {shown(merge)} does not join two tokens into a third")
        pairs.append(pair)
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.json(prefix),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(ids, pairs, ignore_merges=pre.ignore_merges),
    }


def _sentence_piece(
    meta: Metadata, vocabulary: Vocabulary, ids: Mapping[str, int], prefix: bool
) -> dict[str, Any]:
    """As Transformers' ``LlamaTokenizer``: only the start of a text gets a leading space."""
    scores = meta.numbers(f"{PREFIX}scores")
    if scores is None:
        raise meta.error(f"does not have the metadata key {PREFIX}scores: convert it again")
    if not np.isfinite(scores).all():
        raise meta.error(f"{PREFIX}scores has values that are not finite, which rank no merge")
    if max(vocabulary.tokens) >= len(scores):
        raise meta.error(f"has {len(scores)} scores for {max(vocabulary.tokens) + 1} tokens")
    longest = max(vocabulary.tokens.values(), key=len)
    if len(longest) > MAX_PIECE:
        raise meta.error(
            f"has a token of {len(longest)} characters ({shown(longest)}); at most {MAX_PIECE} "
            "are read"
        )
    charsmap = meta.numbers(f"{PREFIX}precompiled_charsmap")
    if charsmap is not None and charsmap.size:
        raise meta.error(f"{PREFIX}precompiled_charsmap, a text normalizer, is not supported")
    byte_fallback = TokenType.BYTE in vocabulary.types.values()
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "first" if prefix else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            vocabulary.ids(),
            merges_of(vocabulary, scores.tolist()),
            unk_token=vocabulary.tokens[ids["unk"]] if "unk" in ids else None,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        ),
    }


def merges_of(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores amount to, best first.

    SentencePiece joins whichever neighbours make the piece with the highest score, so a piece is
    reached through any two pieces that make it.
    """
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    pieces = {
        token: index
        for index, token in vocabulary.tokens.items()
        if vocabulary.types[index] in mergeable
    }
    ranked = []
    for token, index in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], index, pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(
    ids: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _post_processor(
    vocabulary: Vocabulary, ids: Mapping[str, int], adds_bos: bool, adds_eos: bool
) -> dict[str, Any] | None:
    if not adds_bos and not adds_eos:
        return None
    special = {
        role: vocabulary.tokens[ids[role]]
        for role, adds in (("bos", adds_bos), ("eos", adds_eos))
        if adds
    }

    def template(sequences: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for name, kind in sequences:
            if "bos" in special:
                items.append({"SpecialToken": {"id": special["bos"], "type_id": kind}})
            items.append({"Sequence": {"id": name, "type_id": kind}})
            if "eos" in special:
                items.append({"SpecialToken": {"id": special["eos"], "type_id": kind}})
        return items

    return {
        "type": "TemplateProcessing",
        "single": template([("A", 0)]),
        "pair": template([("A", 0), ("B", 1)]),
        "special_tokens": {
            token: {"id": token, "ids": [ids[role]], "tokens": [token]}
            for role, token in special.items()
        },
    }

"""Transformers' text files as the tokenizer metadata of a GGUF file: the way back of ``tokenizer``.

What a GGUF file cannot say, so that llama.cpp would give other token ids, is refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linnet.errors import UnavailableError
from linnet.runtime.tokenizer import Tokenizer
from linnet.weights.checkpoint import TextFiles
from linnet_gguf.container import Value
from linnet_gguf.pretokenizers import PRE_TOKENIZERS, rule_of
from linnet_gguf.tokenizer import END_KEYS, PREFIX, SPACE, TokenType, Vocabulary, merges_of

BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))


@dataclass
class TokenizerOut:
    """Metadata keys in their order, and what the user should know of llama.cpp's tokenizer."""

    metadata: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tokenizer: Tokenizer | None = None
    """What it was made of: reading a vocabulary again would take a while."""

    def set(self, name: str, value: Value) -> None:
        """Add ``tokenizer.ggml.NAME``."""
        self.metadata[PREFIX + name] = value


def write_text(
    text: TextFiles, config: Mapping[str, Any], rows: int, pre_tokenizer: str | None = None
) -> TokenizerOut:
    """The metadata for a model with ``rows`` rows of embedding.

    ``pre_tokenizer`` names the rule by which text is split, where it is not recognised. Raises
    UnavailableError for a tokenizer that a GGUF file cannot hold.
    """
    out = TokenizerOut()
    if text.tokenizer is None:
        out.set("model", "none")
        out.notes.append("the model has no tokenizer.json: the file takes and gives token ids only")
        return out
    tokenizer = out.tokenizer = Tokenizer(text, config)
    content = json.loads(text.tokenizer)
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnavailableError(
            f"the tokenizer is of the type {model.get('type')!r}; GGUF files are written with BPE"
        )
    vocabulary = _vocabulary(tokenizer, model, rows)
    if _is_byte_level(content):
        _byte_level(out, content, vocabulary, rows, pre_tokenizer)
    else:
        if pre_tokenizer is not None:
            raise UnavailableError("a SentencePiece tokenizer has no pre_tokenizer to name")
        _sentence_piece(out, content, tokenizer, vocabulary, rows, text)
    _special(out, tokenizer, text, config)
    if text.chat_template is not None:
        out.metadata["tokenizer.chat_template"] = text.chat_template
    return out


def _vocabulary(tokenizer: Tokenizer, model: Mapping[str, Any], rows: int) -> Vocabulary:
    tokens = {index: token for token, index in sorted(tokenizer.vocabulary.items(), key=_by_id)}
    if max(tokens) >= rows:
        raise UnavailableError(
            f"the tokenizer has the id {max(tokens)} ({tokens[max(tokens)]!r}), but the embedding "
            f"has {rows} rows: the tokenizer is not this model's, or the embedding was not resized"
        )
    added = tokenizer.added_tokens
    unknown, byte_fallback = model.get("unk_token"), bool(model.get("byte_fallback"))
    types = {}
    for index, token in tokens.items():
        if byte_fallback and token == unknown:
            types[index] = TokenType.UNKNOWN
        elif index in added:
            special = added[index].special
            types[index] = TokenType.CONTROL if special else TokenType.USER_DEFINED
        elif byte_fallback and token in BYTES:
            types[index] = TokenType.BYTE
        else:
            types[index] = TokenType.NORMAL
    return Vocabulary(tokens, types)


def _by_id(item: tuple[str, int]) -> int:
    return item[1]


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    return "ByteLevel" in json.dumps(content.get("pre_tokenizer"))


def _tokens(out: TokenizerOut, vocabulary: Vocabulary, rows: int) -> None:
    """One entry for each row: llama.cpp goes by their number."""
    filler = TokenType.UNUSED.value
    out.set("tokens", [vocabulary.tokens.get(i, f"[PAD{i}]") for i in range(rows)])
    types = [vocabulary.types[i].value if i in vocabulary.types else filler for i in range(rows)]
    out.set("token_type", np.array(types, np.int32))


def _byte_level(
    out: TokenizerOut,
    content: Mapping[str, Any],
    vocabulary: Vocabulary,
    rows: int,
    pre_tokenizer: str | None,
) -> None:
    name, prefix = rule_of(content), _adds_prefix(content["pre_tokenizer"])
    if pre_tokenizer is not None and pre_tokenizer not in PRE_TOKENIZERS:
        out.notes.append(f"the pre-tokenizer {pre_tokenizer!r} is not known here: not checked")
    name = pre_tokenizer or name
    if name is None:
        raise UnavailableError(
            "GGUF names the rule by which a tokenizer splits text, and none of those known here "
            f"({', '.join(PRE_TOKENIZERS)}) is this tokenizer's: "
            f"{json.dumps(content['pre_tokenizer'])[:400]}; if llama.cpp knows the rule by a name, "
            "give it as pre_tokenizer"
        )
    if prefix:
        raise UnavailableError(
            "the tokenizer puts a space before a text (add_prefix_space), which llama.cpp's "
            "byte-level tokenizer does not do"
        )
    if content.get("normalizer") is not None:
        out.notes.append(
            f"llama.cpp does not apply the tokenizer's normalizer "
            f"({content['normalizer'].get('type')}): text that it changes gets other token ids"
        )
    out.set("model", "gpt2")
    out.set("pre", name)
    _tokens(out, vocabulary, rows)
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    out.set("merges", merges)


def _adds_prefix(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether the byte-level step puts a space before a text."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return any(step["type"] == "ByteLevel" and step.get("add_prefix_space", True) for step in steps)


def _sentence_piece(
    out: TokenizerOut,
    content: Mapping[str, Any],
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    rows: int,
    text: TextFiles,
) -> None:
    model = content["model"]
    if not model.get("byte_fallback"):
        raise UnavailableError(
            "the tokenizer is a BPE without bytes, neither byte-level nor SentencePiece's, which "
            "llama.cpp does not have"
        )
    merges = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
    scores = _scores(vocabulary, merges)
    out.set("model", "llama")
    out.set("pre", "default")
    _tokens(out, vocabulary, rows)
    padded = np.full(rows, -1000.0, np.float32)
    padded[list(vocabulary.tokens)] = scores
    out.set("scores", padded)
    # Asked of the tokenizer itself: the prefix can stand in three places of its files.
    first = next((i for i, token in vocabulary.tokens.items() if token == SPACE + "a"), None)
    prefix = first in tokenizer.encode("a", add_special_tokens=False)
    if prefix:
        out.notes.append(
            "llama.cpp puts a space before text after every special token, Transformers only "
            "before a whole text: ids differ where text follows a special token"
        )
    out.set("add_space_prefix", prefix)


def _scores(vocabulary: Vocabulary, merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Scores, in the order of the vocabulary, that amount to these merges.

    Where pieces come in the order of their merges, as SentencePiece trains them, a score is minus
    the distance from the first, as SentencePiece has it; otherwise it is minus the rank.
    """
    ids = vocabulary.ids()
    ranked = list(dict.fromkeys(ids["".join(pair)] for pair in merges))
    ordered = ranked == sorted(ranked)
    first = next((i for i, kind in vocabulary.types.items() if kind is TokenType.NORMAL), 0)
    rank = {index: place for place, index in enumerate(ranked)}
    scores = []
    for index, kind in vocabulary.types.items():
        if kind is not TokenType.NORMAL:
            scores.append(0.0 if kind is not TokenType.USER_DEFINED else -1000.0)
        elif ordered:
            scores.append(float(first - index))
        else:
            scores.append(float(-rank.get(index, len(ranked))))
    by_id = [0.0] * (max(vocabulary.tokens) + 1)
    for index, score in zip(vocabulary.tokens, scores, strict=True):
        by_id[index] = score
    made = merges_of(vocabulary, by_id)
    same_order = list(dict.fromkeys(ids["".join(pair)] for pair in made)) == ranked
    if set(made) != set(merges) or not same_order:
        raise UnavailableError(
            f"the tokenizer's {len(merges)} merges are not those of any SentencePiece scores "
            f"(scores in its order make {len(made)}), and GGUF holds scores alone: its ids would "
            "change"
        )
    return scores


def _special(
    out: TokenizerOut, tokenizer: Tokenizer, text: TextFiles, config: Mapping[str, Any]
) -> None:
    """Special ids, what is added to every text, and every id that ends one."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    alone, whole = (tokenizer.encode("a", add_special_tokens=add) for add in (False, True))
    start = next((i for i in range(len(whole)) if whole[i : i + len(alone)] == alone), None)
    if start is None:
        raise UnavailableError("the tokenizer changes a text's own ids by adding special tokens")
    before, after = whole[:start], whole[start + len(alone) :]
    if bos is None and len(before) == 1:
        bos = before[0]
    ends = sorted(tokenizer.end_ids)
    if eos is None and ends:
        eos = after[0] if len(after) == 1 else ends[0]
    if before not in ([], [bos]) or after not in ([], [eos]):
        raise UnavailableError(
            f"the tokenizer puts the ids {before} before every text and {after} after it; GGUF can "
            f"say bos ({bos}) and eos ({eos}) alone"
        )
    for name, index in (("bos", bos), ("eos", eos)):
        if index is not None:
            out.set(f"{name}_token_id", index)
    for role, name in (("unk", "unknown"), ("pad", "padding")):
        spelled = tokenizer.special_tokens.get(f"{role}_token")
        found = None if spelled is None else tokenizer.token_id(spelled)
        if found is not None:
            out.set(f"{name}_token_id", found)
    others = [index for index in ends if index != eos]
    if len(others) > len(END_KEYS) - 1:
        raise UnavailableError(
            f"the model ends a text by {len(ends)} ids ({', '.join(map(str, ends))}); a GGUF file "
            f"names {len(END_KEYS)}: without the others llama.cpp would not stop"
        )
    for key, index in zip(END_KEYS[1:], others, strict=False):
        out.set(key, index)
    out.set("add_bos_token", bool(before))
    out.set("add_eos_token", bool(after))
    stripping = [
        token.content
        for token in tokenizer.added_tokens.values()
        if token.lstrip or token.rstrip or token.single_word
    ]
    if stripping:
        out.notes.append(
            f"llama.cpp does not know that the tokens {', '.join(stripping[:5])} take in the "
            "space beside them"
        )

"""How byte-level BPE tokenizers split text before merging, by GGUF's name for each rule.

A name stands for the ``tokenizer.json`` of the model it was first seen in; the entries here are
those files' own rules, so that ids equal that tokenizer's. ``default`` is llama.cpp's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PreTokenizer:
    """A split rule and the settings that go with it.

    ``steps`` come before bytes are mapped to characters; ``own_regex`` has the byte-level step
    split by GPT-2's rule. ``adds_bos`` is what llama.cpp does where a file does not say.
    """

    steps: tuple[Mapping[str, Any], ...] = ()
    own_regex: bool = False
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False

    def json(self, add_prefix_space: bool) -> dict[str, Any]:
        """The ``pre_tokenizer`` of ``tokenizer.json``."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": add_prefix_space,
            "trim_offsets": True,
            "use_regex": self.own_regex,
        }
        if not self.steps:
            return byte_level
        return {"type": "Sequence", "pretokenizers": [*self.steps, byte_level]}


def _split(regex: str) -> Mapping[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


def _contractions_words_and(numbers: str) -> Mapping[str, Any]:
    """The rule that Llama 3 and Qwen 2 share, but for how many digits go together."""
    return _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer(own_regex=True)
_DIGITS = PreTokenizer(steps=({"type": "Digits", "individual_digits": True},), own_regex=True)
_LLAMA3 = PreTokenizer(
    steps=(_contractions_words_and(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True
)
_QWEN2 = PreTokenizer(steps=(_contractions_words_and(r"\p{N}"),), normalizer={"type": "NFC"})
_DEFAULT = PreTokenizer(
    steps=(
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        _split(r"\p{N}+"),
        _split(r"[0-9][0-9][0-9]"),
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
"""By the value of ``tokenizer.ggml.pre``."""


def rule_of(tokenizer: Mapping[str, Any]) -> str | None:
    """The name whose rule is that of a ``tokenizer.json``, or None where no rule is.

    The steps themselves are compared, not ids of a sample text, which unlike rules can share.
    """
    wanted = (
        _plain(tokenizer.get("pre_tokenizer")),
        tokenizer.get("normalizer"),
        bool(tokenizer.get("model", {}).get("ignore_merges")),
    )
    for name, rule in PRE_TOKENIZERS.items():
        normalizer = None if rule.normalizer is None else dict(rule.normalizer)
        if (_plain(rule.json(False)), normalizer, rule.ignore_merges) == wanted:
            return name
    return None


def _plain(step: Any) -> Any:
    """A pre-tokenizer's steps, with defaults filled in and without what changes no ids."""
    if not isinstance(step, Mapping):
        return None
    if step.get("type") == "Sequence":
        return [_plain(inner)[0] for inner in step["pretokenizers"]]
    if step.get("type") == "ByteLevel":
        return [("ByteLevel", step.get("use_regex", True))]
    return [json.dumps({**{"invert": False}, **step}, sort_keys=True)]

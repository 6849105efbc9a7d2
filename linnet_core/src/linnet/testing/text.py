"""The text side of F0: a byte-level tokenizer of 131 tokens for 136 rows, and a chat template."""

import json
from typing import Any

from linnet.weights.checkpoint import TextFiles

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = "<think>"
"""An added token that is not special."""
MERGES = [
    "Ġ t",
    "h e",
    "i n",
    "e r",
    "Ġt he",
    "Ġ a",
    "o n",
    "r e",
    "a t",
    "1 2",
    "12 3",
    "Ġ s",
    "Ġ Ġ",
    "ĠĠ ĠĠ",
    "n d",
    "Ġa nd",
    "i s",
    "o r",
    "e s",
    "l l",
    "' s",
    "Ċ Ċ",
    "w or",
    "o u",
    "l d",
    "wor ld",
    "Ġ world",
    "Ġ w",
    "H e",
    "He ll",
    "Hell o",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def f0_text(**settings: Any) -> TextFiles:
    """Files as Transformers has them; ``settings`` go into ``tokenizer_config.json``.

    It knows printable ASCII, space and newline. ``<|im_end|>`` (2) ends a turn and
    ``<|endoftext|>`` (0) a text.
    """
    tokens = [*CONTROL, THINK, *map(chr, range(33, 127)), "Ġ", "Ċ"]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags, "special": token != THINK}
            for index, token in enumerate((*CONTROL, THINK))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in MERGES],
        },
    }
    return TextFiles(
        tokenizer=json.dumps(tokenizer, ensure_ascii=False),
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": CONTROL[1],
            "eos_token": CONTROL[2],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            **settings,
        },
        generation_config={"bos_token_id": 1, "eos_token_id": [2, 0]},
        chat_template=CHAT_TEMPLATE,
    )

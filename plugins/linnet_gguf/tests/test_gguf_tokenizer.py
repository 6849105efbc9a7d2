"""The tokenizer that a file describes: the ids it gives, and what is refused."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from linnet.errors import CheckpointError
from linnet_gguf.pretokenizers import PRE_TOKENIZERS
from linnet_gguf.tokenizer import TokenType, Vocabulary, merges_of

GGML = "tokenizer.ggml."


def tokenizer_of(checkpoint: Any) -> Tokenizer:
    return Tokenizer.from_str(checkpoint.text.tokenizer)


def pieces(name: str, text: str) -> list[str]:
    """How a rule splits ASCII text, spaces shown as the byte-level step shows them."""
    step = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": PRE_TOKENIZERS[name].json(add_prefix_space=False),
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
        )
    ).pre_tokenizer
    assert isinstance(step, pre_tokenizers.PreTokenizer)
    return [piece for piece, _ in step.pre_tokenize_str(text)]


SPLITS = {
    "gpt-2": "it 's Ġ12345 Ġ Ġx ' S !? Ċ Ċ y",
    "smollm": "it 's Ġ 1 2 3 4 5 ĠĠ 6 ' S !? Ċ Ċ y",
    "llama-bpe": "it 's Ġ 123 45 Ġ Ġx 'S !?ĊĊ y",
    "qwen2": "it 's Ġ 1 2 3 4 5 Ġ Ġx 'S !?ĊĊ y",
    "default": "it ' s Ġ 123 45 Ġ Ġx ' S !? Ċ Ċ y",
}


@pytest.mark.parametrize("name", SPLITS)
def test_each_rule_splits_as_its_model_does(name: str) -> None:
    text = "it's 12345  x'S!?\n\ny"
    if name == "smollm":
        text = text.replace("x", "6")  # Spaces before a digit belong together, and to no digit.
    assert pieces(name, text) == SPLITS[name].split()


def test_byte_level_ids(open_with: Callable[..., Any]) -> None:
    checkpoint = open_with({})
    tokenizer = tokenizer_of(checkpoint)
    assert tokenizer.get_vocab_size() == 131
    # Digits stay apart, though 12 has a merge.
    expected = ["Hello", "Ġworld", "'s", "Ġ", "1", "2", "3"]
    assert tokenizer.encode("Hello world's 123").tokens == expected
    chat = "<|im_start|>user\nthe<|im_end|>\n"
    encoding = tokenizer.encode(chat)
    assert encoding.tokens[0] == "<|im_start|>"
    assert encoding.ids[0] == 1
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == chat
    assert tokenizer.decode(encoding.ids) == "user\nthe\n"


def test_types_become_added_tokens(open_with: Callable[..., Any]) -> None:
    added = tokenizer_of(open_with({})).get_added_tokens_decoder()
    assert {index: token.content for index, token in added.items()} == {
        0: "<|endoftext|>",
        1: "<|im_start|>",
        2: "<|im_end|>",
        3: "<think>",
    }
    assert [token.special for token in added.values()] == [True, True, True, False]


def test_filler_is_no_part_of_the_tokenizer(open_with: Callable[..., Any]) -> None:
    checkpoint = open_with({})
    tokenizer = tokenizer_of(checkpoint)
    assert checkpoint.config["vocab_size"] == 136
    assert tokenizer.id_to_token(130) == "Hello"
    assert tokenizer.id_to_token(131) is None
    assert len(tokenizer.encode("[PAD131]").ids) == 8


def test_more_tokens_than_rows_is_an_error(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(layers=1)
    for name in ("token_embd.weight", "output.weight"):
        model.tensors[name] = model.tensors[name][:130]
    with pytest.raises(CheckpointError, match=r"136 tokens, but token_embd\.weight has 130 rows"):
        open_model(model)


@pytest.mark.parametrize(
    ("pre", "stated", "added"),
    [
        ("smollm", None, 0),
        ("smollm", True, 1),
        ("smollm", False, 0),
        ("llama-bpe", None, 1),
        ("llama-bpe", False, 0),
    ],
)
def test_the_first_token(
    pre: str, stated: bool | None, added: int, open_with: Callable[..., Any]
) -> None:
    checkpoint = open_with({f"{GGML}pre": pre, f"{GGML}add_bos_token": stated})
    tokenizer = tokenizer_of(checkpoint)
    assert tokenizer.encode("the").ids.count(1) == added
    assert tokenizer.encode("the", add_special_tokens=False).ids.count(1) == 0
    assert checkpoint.text.tokenizer_config["add_bos_token"] is bool(added)


def test_the_last_token(open_with: Callable[..., Any]) -> None:
    checkpoint = open_with({f"{GGML}add_eos_token": True})
    assert tokenizer_of(checkpoint).encode("the").ids[-1] == 2
    with pytest.raises(CheckpointError, match=r"adds the bos token .* no tokenizer"):
        open_with({f"{GGML}add_bos_token": True, f"{GGML}bos_token_id": None})


def test_every_end_is_kept(open_with: Callable[..., Any]) -> None:
    checkpoint = open_with({f"{GGML}eot_token_id": 11, f"{GGML}eom_token_id": 13})
    assert checkpoint.config["eos_token_id"] == 2
    assert checkpoint.text.generation_config["eos_token_id"] == [2, 11, 13]
    assert checkpoint.notes == ()


def test_an_unstated_end_of_turn_is_recognised_and_noted(open_with: Callable[..., Any]) -> None:
    base = {f"{GGML}eos_token_id": 0}
    checkpoint = open_with(base)
    assert checkpoint.text.generation_config["eos_token_id"] == [0, 2]
    assert "<|im_end|> (2) ends a turn" in checkpoint.notes[0]
    no_template = open_with({**base, "tokenizer.chat_template": None})
    assert no_template.text.generation_config["eos_token_id"] == [0]
    assert no_template.text.chat_template is None


def test_settings_and_template(open_with: Callable[..., Any]) -> None:
    text = open_with({f"{GGML}padding_token_id": 0, f"{GGML}unknown_token_id": 0}).text
    assert text.chat_template is not None
    assert text.tokenizer_config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": text.chat_template,
    }
    assert text.generation_config["pad_token_id"] == 0


REFUSED = [
    ({f"{GGML}model": "bert"}, "model is 'bert'; supported are gpt2"),
    ({f"{GGML}pre": None}, r"does not state tokenizer\.ggml\.pre"),
    ({f"{GGML}pre": "tekken"}, "pre is 'tekken'; the rules known here are default, gpt-2"),
    ({f"{GGML}tokens": None}, "does not have the metadata key .*tokens"),
    ({f"{GGML}token_type": None}, "does not have the metadata key .*token_type"),
    ({f"{GGML}token_type": [1, 2]}, "136 tokens and 2 token types"),
    ({f"{GGML}token_type": [9] * 136}, "has the type 9"),
    ({f"{GGML}merges": None}, "does not have the metadata key .*merges"),
    ({f"{GGML}merges": ["a zebra"]}, "'a zebra' does not join two tokens"),
    ({f"{GGML}merges": ["nospace"]}, "'nospace' does not join two tokens"),
    ({f"{GGML}eos_token_id": 999}, "eos_token_id is 999, which is not a token"),
    ({f"{GGML}eos_token_id": 135}, "eos_token_id is 135, which is not a token"),
    ({f"{GGML}eos_token_id": "2"}, "eos_token_id is '2', not of type int"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_would_give_other_ids_is_refused(
    changes: Mapping[str, Any], message: str, open_with: Callable[..., Any]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_with(changes)


def test_a_token_twice_is_refused(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(layers=1)
    model.metadata[f"{GGML}tokens"][50] = "<think>"
    with pytest.raises(CheckpointError, match="'<think>' twice"):
        open_model(model)


def test_no_tokenizer_is_noted(open_with: Callable[..., Any]) -> None:
    checkpoint = open_with({f"{GGML}model": None})
    assert checkpoint.text.tokenizer is None
    assert "has no tokenizer" in checkpoint.notes[0]


# SentencePiece: scores in place of merges.

PIECES = ["▁", *"abcdehlorw", "▁a", "ab", "bc", "abc", "he", "ll", "lo", "llo", "hello"]
PIECES += ["▁hello", "▁wor", "wo", "wor", "ld", "▁world", "or", "aa", "aaa", "▁▁"]


def sentence_piece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [2, 3, 3] + [6] * 256 + [1] * len(PIECES)
    return {
        f"{GGML}model": "llama",
        f"{GGML}pre": "default",
        f"{GGML}tokens": tokens,
        f"{GGML}token_type": types,
        f"{GGML}scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
        f"{GGML}merges": None,
        f"{GGML}unknown_token_id": 0,
        "tokenizer.chat_template": None,
        **{f"{GGML}{name}": value for name, value in changes.items()},
    }


@pytest.fixture
def open_pieces(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> Callable[..., Any]:
    def open_(**changes: Any) -> Any:
        model = make_llama(layers=1)
        for name in ("token_embd.weight", "output.weight"):
            model.tensors[name] = model.tensors[name].repeat(3, axis=0)
        model.metadata.update(sentence_piece(**changes))
        return open_model(model)

    return open_


def test_pieces_bytes_and_spaces(open_pieces: Callable[..., Any]) -> None:
    checkpoint = open_pieces()
    tokenizer = tokenizer_of(checkpoint)
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    emoji = tokenizer.encode("abc 🫠")
    assert emoji.tokens[-4:] == ["<0xF0>", "<0x9F>", "<0xAB>", "<0xA0>"]
    for text in ("hello world", "abc 🫠 x", "a\nb", "hello  world", "héllo"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    after_special = tokenizer.encode("</s>hello", add_special_tokens=False).tokens
    assert after_special == ["</s>", "hello"]
    assert checkpoint.text.tokenizer_config["tokenizer_class"] == "LlamaTokenizer"


def test_pieces_without_a_leading_space(open_pieces: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of(open_pieces(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("hello world").tokens == ["hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


def test_pieces_need_scores(open_pieces: Callable[..., Any]) -> None:
    with pytest.raises(CheckpointError, match=r"does not have the metadata key .*scores"):
        open_pieces(scores=None)
    with pytest.raises(CheckpointError, match="has 2 scores for"):
        open_pieces(scores=[0.0, 1.0])
    count = len(sentence_piece()[f"{GGML}tokens"])
    with pytest.raises(CheckpointError, match="scores has values that are not finite"):
        open_pieces(scores=[float("nan")] * count)


def test_a_vocabulary_of_nothing_but_filler(open_pieces: Callable[..., Any]) -> None:
    tokens = [f"[PAD{index}]" for index in range(8)]
    with pytest.raises(CheckpointError, match="has 8 tokens, all of them filler"):
        open_pieces(tokens=tokens, token_type=[5] * len(tokens))


def test_a_piece_of_a_million_characters_is_refused(open_pieces: Callable[..., Any]) -> None:
    tokens = [*sentence_piece()[f"{GGML}tokens"][:-1], "a" * 1_000_000]
    with pytest.raises(CheckpointError, match=r"has a token of 1000000 characters .*aaa"):
        open_pieces(tokens=tokens)


def test_the_same_ids_as_transformers(open_pieces: Callable[..., Any]) -> None:
    transformers = pytest.importorskip("transformers")
    metadata = sentence_piece()
    tokens, scores = metadata[f"{GGML}tokens"], metadata[f"{GGML}scores"]
    merges = transformers.tokenization_utils_base.generate_merges(
        {token: index for index, token in enumerate(tokens)},
        dict(zip(tokens, scores, strict=True)),
    )
    theirs = transformers.LlamaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=merges
    )
    ours = tokenizer_of(open_pieces())
    for text in ("hello world", " hello", "  hello", "abcabc aaaa", "</s>hello", "é 漢", ""):
        plain = ours.encode(text, add_special_tokens=False).ids
        assert plain == theirs(text, add_special_tokens=False)["input_ids"], text


VOCABULARY = Vocabulary(
    dict(enumerate(PIECES)), dict.fromkeys(range(len(PIECES)), TokenType.NORMAL)
)


def by_score(text: str) -> list[str]:
    """SentencePiece's algorithm: join the neighbours that make the best piece, leftmost first."""
    symbols, rank = list(text), {piece: index for index, piece in enumerate(PIECES)}
    while True:
        joins = [
            (rank[symbols[i] + symbols[i + 1]], i)
            for i in range(len(symbols) - 1)
            if symbols[i] + symbols[i + 1] in rank
        ]
        if not joins:
            return symbols
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(text=st.text(alphabet="▁abchelowrd", max_size=24))
def test_merges_do_what_scores_do(text: str) -> None:
    from tokenizers import models

    merges = merges_of(VOCABULARY, [-float(i) for i in range(len(PIECES))])
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY.ids(), merges=merges))
    assert tokenizer.encode(text).tokens == by_score(text)

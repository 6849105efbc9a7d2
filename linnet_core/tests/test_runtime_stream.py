"""Streams: text from tokens in any cut, with characters and stop texts that span tokens."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from linnet.runtime.stream import Detokenizer, StopMatcher
from linnet.runtime.tokenizer import Tokenizer as LinnetTokenizer
from linnet.weights.checkpoint import TextFiles

FACE = "\U0001fae0"
WORDS = ["Hello", " world", ",", " it", "'s", "é", "日本", "\ufffd", " \ufffd x", "  ", "\n", "a"]


def byte_level():
    """Every byte is a token, and so are WORDS and some pieces that cut characters."""
    stand_in = {byte: char for char, byte in _alphabet().items()}
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [word.encode() for word in WORDS if len(word.encode()) > 1]
    pieces += [FACE.encode()[:2], b"a" + FACE.encode()[:3], FACE.encode()[3:] + b" b"]
    vocab = {"".join(stand_in[b] for b in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<plain>", special=False)])
    return wrap(tokenizer)


def _alphabet():
    from linnet.runtime.stream import _BYTE_OF

    return _BYTE_OF


def sentencepiece_like():
    """As Llama 2: a space in front, byte tokens for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [word.replace(" ", "▁") for word in WORDS] + ["▁", "▁Hello", "▁a"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrap(tokenizer)


def metaspace():
    vocab = [("<unk>", 0.0), *((piece, -1.0) for piece in ["▁Hello", "▁wor", "ld", "▁", "é"])]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return wrap(tokenizer)


def wrap(tokenizer):
    return LinnetTokenizer(TextFiles(tokenizer=tokenizer.to_str()), {})


BYTES, PIECES, SPACES = byte_level(), sentencepiece_like(), metaspace()


def chunks(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def ids_of(tokenizer, tokens):
    found = [tokenizer.token_id(token) for token in tokens]
    assert None not in found
    return found


@given(st.lists(st.integers(0, BYTES.vocab_size + 4), max_size=40))
def test_byte_level_equals_full_decode(ids):
    assert "".join(chunks(BYTES, ids)) == BYTES.decode(ids)


@given(st.lists(st.integers(0, SPACES.vocab_size - 1), max_size=20))
def test_metaspace_equals_full_decode(ids):
    assert "".join(chunks(SPACES, ids)) == SPACES.decode(ids)


@given(st.lists(st.integers(0, PIECES.vocab_size - 1), max_size=40))
def test_byte_fallback_replaces_bad_bytes_only(ids):
    """Equal to the full decode, but for runs of byte tokens that are not UTF-8."""
    names = {PIECES.token_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    expected, run, broken = "", b"", False
    for token in [*(i for i in ids if i > 2), None]:  # special tokens are not there at all
        if token in names:
            run += bytes([names[token]])
            continue
        text = run.decode("utf-8", "replace")
        broken |= text.encode() != run
        expected, run = expected + text, b""
        if token is not None:
            # A comma in front takes the place of the text's start.
            comma = PIECES.token_id(",")
            expected += PIECES.decode([comma, token])[1:]
    expected = expected[1:] if expected.startswith(" ") else expected
    assert "".join(chunks(PIECES, ids)) == expected
    if not broken:
        assert expected == PIECES.decode(ids)


@given(st.lists(st.sampled_from([*WORDS, FACE, "ü", " "]), max_size=12).map("".join))
def test_text_that_was_encoded_comes_back(text):
    for tokenizer in (BYTES, PIECES):
        ids = tokenizer.encode(text)
        pieces = chunks(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert any("\ufffd" in piece for piece in pieces) == ("\ufffd" in text)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES])
def test_a_character_of_four_tokens_between_words(tokenizer):
    """C22: nothing for three tokens, the character with the fourth, and no U+FFFD."""
    ids = [*tokenizer.encode("Hello"), *tokenizer.encode("日" + FACE + "日")]
    text = tokenizer.decode(ids)
    pieces = chunks(tokenizer, ids)
    assert "".join(pieces) == text
    assert FACE in pieces
    assert pieces[pieces.index(FACE) - 3 : pieces.index(FACE)] == ["", "", ""]
    assert "\ufffd" not in text


def test_only_the_cut_character_is_held():
    face = [BYTES.token_id(char) for char in _spell(FACE.encode())]
    assert chunks(BYTES, [*face, *face, *face[:3]]) == [
        *("", "", "", FACE),
        *("", "", "", FACE),
        *("", "", ""),
        "\ufffd",
    ]


def test_a_cut_run_of_byte_tokens_keeps_the_good_characters():
    face = ids_of(PIECES, ["<0xF0>", "<0x9F>", "<0xAB>", "<0xA0>"])
    assert "".join(chunks(PIECES, [*face, *face[:2]])) == FACE + "\ufffd"


def test_a_real_replacement_character_is_given_at_once():
    assert chunks(BYTES, [BYTES.token_id(_spell("\ufffd".encode()))])[0] == "\ufffd"
    assert chunks(PIECES, ids_of(PIECES, ["a", "\ufffd"]))[1] == "\ufffd"


def test_leading_spaces():
    assert chunks(PIECES, ids_of(PIECES, ["▁Hello", "▁world", "▁Hello"])) == [
        "Hello",
        " world",
        " Hello",
        "",
    ]
    special = PIECES.token_id("<s>")
    assert "".join(chunks(PIECES, [special, *ids_of(PIECES, ["▁Hello", "▁a"])])) == "Hello a"


def test_special_tokens_are_left_out_and_others_kept():
    ids = [BYTES.token_id("<s>"), BYTES.token_id("a"), BYTES.token_id("<plain>")]
    assert "".join(chunks(BYTES, ids)) == "a<plain>" == BYTES.decode(ids)


def test_a_token_beyond_the_tokenizer_has_no_text():
    assert chunks(BYTES, [10**6]) == ["", ""]


def _spell(data):
    stand_in = {byte: char for char, byte in _alphabet().items()}
    return "".join(stand_in[byte] for byte in data)


# Stop texts


def matched(parts, stops):
    matcher = StopMatcher(stops)
    given_out = [matcher.feed(part) for part in parts]
    return given_out, matcher.matched, matcher.flush()


def expected(text, stops):
    """The definition: try every end, shortest first, and the earliest start at that end."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], text[min(starts) : end]
    return text, None


@given(
    st.lists(st.text("abé", max_size=4), max_size=8),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_stops_do_not_depend_on_the_cuts(parts, stops):
    given_out, found, rest = matched(parts, stops)
    text, stop = expected("".join(parts), stops)
    assert "".join(given_out) + rest == text
    assert found == stop
    assert not (found and rest)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_held_is_the_longest_start_of_a_stop(text, stops):
    matcher = StopMatcher(stops)
    out = matcher.feed(text)
    if matcher.matched is None:
        starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((s for s in starts if text.endswith(s)), key=len, default="")
        assert out == text[: len(text) - len(held)]
        assert matcher.flush() == held


def test_a_stop_over_four_parts():
    """C23"""
    assert matched(["DEF", "G", "HI", "J"], ["DEFGHIJ"]) == ([""] * 4, "DEFGHIJ", "")


@pytest.mark.parametrize(
    ("parts", "stops", "text", "found"),
    [
        (["one STOP two"], ["STOP"], "one ", "STOP"),
        (["ab", "c", "d"], ["abcd", "bc"], "a", "bc"),
        (["xab"], ["ab", "xab"], "", "xab"),
        (["aa", "ab"], ["aab"], "a", "aab"),
        (["DEF", "X", "DEF"], ["DEFG"], "DEFXDEF", None),
        (["é", "日", "本"], ["日本"], "é", "日本"),
        (["abc"], [], "abc", None),
    ],
)
def test_stops(parts, stops, text, found):
    given_out, stop, rest = matched(parts, stops)
    assert ("".join(given_out) + rest, stop) == (text, found)


def test_nothing_after_a_match():
    matcher = StopMatcher(["x"])
    assert [matcher.feed("ax"), matcher.feed("b"), matcher.flush()] == ["a", "", ""]


def test_a_stop_split_inside_a_character():
    """The stop text is a character of four tokens."""
    detokenizer, matcher = Detokenizer(BYTES), StopMatcher([FACE])
    ids = BYTES.encode("Hello" + FACE + "a")
    out = [matcher.feed(detokenizer.feed(token)) for token in ids]
    assert "".join(out) == "Hello"
    assert matcher.matched == FACE


def test_the_alphabet_is_that_of_the_tokenizers_library():
    assert set(_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert re.fullmatch(r"[ -~]+", "".join(sorted(_alphabet()))[:94])

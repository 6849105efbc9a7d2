"""The generation loop, on a session whose arithmetic can be done by hand.

``Counting`` keeps real cache rows, and its next token is a sum over what the row holds, so a
token written to a wrong row or position changes the answer.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from linnet.errors import RequestError, UnavailableError
from linnet.plugins.descriptors import API_VERSION, Backend, Capability
from linnet.plugins.interfaces import Granted
from linnet.runtime.model import Model
from linnet.spec.program import Program
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Checkpoint, TextFiles

VOCAB = 136
WORDS = ["DEF", "G", "HI", "J", " a", " b", "STOP", " end", "<|end|>", "</s>", "é"]
FACE = [f"<0x{byte:02X}>" for byte in "\U0001fae0".encode()]


class Counting:
    """Next token: the sum of the row's tokens, each times its position plus one, and the seed."""

    def __init__(self, rows=1, max_seq=64, script=None):
        self.granted = Granted("counting", "none", "f32", "cpu", rows, max_seq, 1)
        self.cache = np.full((rows, max_seq), -1)
        self.script = script
        self.calls = []
        self.closed = False

    def following(self, row, length, seed=0):
        held = self.cache[row, :length]
        assert (held >= 0).all(), "reads what was never written"
        if self.script is not None:
            return self.script[length - self.prompt]
        return int((held * (1 + np.arange(length))).sum() + seed) % VOCAB

    def run(self, entry, inputs):
        step, choice = entry.split("_")
        seeds = inputs["seeds"] if choice == "sample" else np.zeros(len(inputs["tokens"]), int)
        self.calls.append((entry, {name: array.tolist() for name, array in inputs.items()}))
        assert all(a.dtype in (np.int32, np.float32) for a in inputs.values())
        out = []
        if step == "extend":
            lines = zip(
                inputs["tokens"], inputs["rows"], inputs["starts"], inputs["lengths"], strict=True
            )
            for (line, row, start, length), seed in zip(lines, seeds, strict=True):
                self.cache[row, start : start + length] = line[:length]
                self.prompt = start + length
                out.append(self.following(row, start + length, seed))
        else:
            assert len(inputs["tokens"]) == self.granted.rows
            for row, (token, position) in enumerate(
                zip(inputs["tokens"], inputs["positions"], strict=True)
            ):
                if position < 0:
                    out.append(0)
                    continue
                self.cache[row, position] = token
                out.append(self.following(row, position + 1, seeds[row]))
        return np.array(out, np.int32)

    def source(self):
        return None

    def close(self):
        self.closed = True


def by_hand(prompt, count, seed=0):
    """What ``Counting`` gives for a prompt alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(t * (i + 1) for i, t in enumerate(tokens)) + seed)
        tokens[-1] %= VOCAB
    return tuple(tokens[len(prompt) :])


def words():
    vocab = {word: index for index, word in enumerate([*WORDS, *FACE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|end|>", "</s>"])
    return tokenizer


def make(session, *, text=None, config=None, capabilities=("cache", "choice"), location="m"):
    from pathlib import Path

    if text is None:
        text = TextFiles(tokenizer=words().to_str())
    checkpoint = Checkpoint(Path(location), "test", config or {}, {}, text)
    program = Program("test", (), (), {}, {})
    bound = BoundModel(program, checkpoint, {}, VOCAB, session.granted.max_seq, {})
    backend = Backend(
        "counting",
        "x:Y",
        "Counting",
        ("none",),
        ("cpu",),
        ("f32",),
        frozenset(map(Capability, capabilities)),
        api_version=API_VERSION,
    )
    return Model(bound, session, backend)


def ids(*tokens):
    return [[*WORDS, *FACE].index(token) for token in tokens]


def scripted(*tokens, max_seq=64, **model):
    return make(Counting(script=ids(*tokens) + [4] * 64, max_seq=max_seq), **model)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_prompts_of_unlike_lengths_share_the_rows(rows):
    prompts = [[5], [7, 1, 3, 2, 9, 4, 6], list(range(19)), [100, 3], [44]]
    model = make(Counting(rows=rows))
    results = model.generate_many(prompts, max_new_tokens=9)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == by_hand(prompt, 9)
        assert (result.finish, result.prompt_tokens) == ("length", len(prompt))


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 6),
    st.booleans(),
)
def test_any_batch_gives_what_each_prompt_gives_alone(prompts, rows, count, reuse):
    model = make(Counting(rows=rows))
    for _ in range(2):
        results = {}
        for event in model._events(prompts, reuse, {"max_new_tokens": count}):
            if event.generation:
                results[event.index] = event.generation.tokens
        assert results == {i: by_hand(prompt, count) for i, prompt in enumerate(prompts)}


def test_idle_rows_are_marked():
    session = Counting(rows=3)
    make(session).generate([5, 6], max_new_tokens=2)
    first = by_hand([5, 6], 1)[0]
    assert session.calls == [
        (
            "extend_greedy",
            {"tokens": [[5, 6]], "rows": [0], "starts": [0], "lengths": [2]},
        ),
        ("decode_greedy", {"tokens": [first, 0, 0], "positions": [2, -1, -1]}),
    ]


def test_sampling_options_reach_every_row():
    session = Counting(rows=2)
    options = {"temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.25, "seed": 11}
    result = make(session).generate([5], max_new_tokens=3, **options)
    assert result.tokens == by_hand([5], 3, seed=11)
    assert result.seed == 11
    assert [entry for entry, _ in session.calls] == ["extend_sample"] + ["decode_sample"] * 2
    names = {"temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.25, "seeds": 11}
    for (_, inputs), rows in zip(session.calls, (1, 2, 2), strict=True):
        assert {name: inputs[name] for name in names} == {n: [v] * rows for n, v in names.items()}


def test_a_drawn_seed_is_reported_and_gives_the_same_again():
    model = make(Counting())
    drawn = model.generate([5], max_new_tokens=4, temperature=1.0)
    again = model.generate([5], max_new_tokens=4, temperature=1.0, seed=drawn.seed)
    assert again == drawn
    assert model.generate([5], max_new_tokens=1).seed is None


# Where it ends


def test_any_end_id_stops_and_is_not_in_the_text():
    """C05"""
    text = TextFiles(
        tokenizer=words().to_str(),
        tokenizer_config={"eos_token": "</s>"},
        generation_config={"eos_token_id": [2, *ids("<|end|>")]},
    )
    model = scripted("<|end|>", text=text, config={"eos_token_id": 2})
    result = model.generate([5])
    assert (result.text, result.tokens, result.finish) == ("", tuple(ids("<|end|>")), "stop")
    assert result.stopped_by == ids("<|end|>")[0]
    assert set(model.end_ids) == {2, *ids("<|end|>", "</s>")}

    ordinary = scripted(" a", "HI", text=text, config={"eos_token_id": 2}).generate([5])
    assert (ordinary.text, ordinary.new_tokens, ordinary.finish) == (" a", 2, "stop")


def test_ignore_eos_goes_on():
    model = scripted("HI", " a", config={"eos_token_id": 2})
    result = model.generate([5], ignore_eos=True, max_new_tokens=2)
    assert (result.text, result.finish) == ("HI a", "length")


def test_a_stop_text_over_four_tokens():
    """C23: nothing is given out, and all four tokens count."""
    model = scripted("DEF", "G", "HI", "J")
    with model.stream([5], stop="DEFGHIJ") as stream:
        assert list(stream) == []
        result = stream.generation
    assert (result.text, result.finish, result.new_tokens) == ("", "stop", 4)
    assert result.stopped_by == "DEFGHIJ"


def test_a_stop_text_in_the_prompt_is_ignored():
    assert scripted(" a", " b").generate(ids("STOP"), stop="STOP", max_new_tokens=2).text == " a b"


def test_what_was_held_for_a_stop_comes_at_the_end():
    assert scripted("DEF", "G").generate([5], stop="DEFGHIJ", max_new_tokens=2).text == "DEFG"
    ended = scripted("DEF", "HI", config={"eos_token_id": 2}).generate([5], stop="DEFX")
    assert (ended.text, ended.finish) == ("DEF", "stop")


def test_a_character_cut_by_the_limit_is_the_same_streamed_or_not():
    """C22"""
    for count in range(1, 7):
        tokens = (" a", *FACE, " b")
        whole = scripted(*tokens).generate([5], max_new_tokens=count)
        with scripted(*tokens).stream([5], max_new_tokens=count) as stream:
            assert "".join(stream) == whole.text == stream.generation.text
        cut = " a" + ("\ufffd" if 1 < count < 5 else "\U0001fae0" if count >= 5 else "")
        assert whole.text == cut + (" b" if count == 6 else "")


# Limits


def test_a_prompt_as_long_as_the_context_is_refused():
    """C25"""
    session = Counting(max_seq=64)
    with pytest.raises(RequestError, match="the prompt has 64 tokens and the context 64"):
        make(session).generate([1] * 64)
    assert session.calls == []


def test_what_does_not_fit_is_capped():
    """C25"""
    result = make(Counting(max_seq=64)).generate([1] * 63, max_new_tokens=10)
    assert (result.new_tokens, result.finish) == (1, "length")
    assert make(Counting(max_seq=64)).generate([1] * 60).new_tokens == 4


def test_one_bad_prompt_stops_all_before_any_work():
    session = Counting(rows=2)
    with pytest.raises(RequestError, match=r"prompt token 1 is 136; .* from 0 to 135"):
        make(session).generate_many([[1], [1, 136]])
    assert session.calls == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([-1], "prompt token 0 is -1"),
        ([1.5], "text or a list of token ids"),
        (["a"], "text or a list of token ids"),
    ],
)
def test_prompts_that_are_not(prompt, message):
    with pytest.raises(RequestError, match=message):
        make(Counting()).generate(prompt)


def test_numpy_ids_are_ids():
    assert make(Counting()).generate(np.array([5, 6]), max_new_tokens=3).tokens == by_hand(
        [5, 6], 3
    )


# A prefix that is there already


def test_a_reused_prefix_gives_the_same_answer():
    session = Counting(rows=2)
    model = make(session)
    first = model.generate([5, 6, 7], max_new_tokens=4, reuse_prefix=True)
    longer = [5, 6, 7, *first.tokens, 9, 9]
    session.calls.clear()
    second = model.generate(longer, max_new_tokens=4, reuse_prefix=True)
    assert second.tokens == by_hand(longer, 4)
    # The last token of an answer is never written, so it is computed with what is new.
    assert second.reused_tokens == len(longer) - 3
    assert session.calls[0][1]["starts"] == [len(longer) - 3]
    assert session.calls[0][1]["tokens"] == [longer[-3:]]


def test_the_same_prompt_again_computes_its_last_token():
    model = make(Counting())
    model.generate([5, 6, 7], max_new_tokens=4, reuse_prefix=True)
    again = model.generate([5, 6, 7], max_new_tokens=4, reuse_prefix=True)
    assert (again.reused_tokens, again.tokens) == (2, by_hand([5, 6, 7], 4))


def test_the_row_with_the_longest_prefix_is_taken():
    session = Counting(rows=3)
    model = make(session)
    model.generate_many([[1, 2, 3], [4, 5, 6], [4, 5, 7]], max_new_tokens=2)
    session.calls.clear()
    model.generate([4, 5, 7, 8], max_new_tokens=1, reuse_prefix=True)
    assert session.calls[0][1]["rows"] == [2]


def test_nothing_is_reused_unasked():
    session = Counting()
    model = make(session)
    for _ in range(2):
        model.generate([5, 6, 7], max_new_tokens=2)
    assert [call["starts"] for entry, call in session.calls if "extend" in entry] == [[0], [0]]


def test_a_step_that_fails_leaves_a_cache_that_is_right():
    session = Counting()
    model = make(session)
    model.generate([5, 6, 7, 8], max_new_tokens=2)
    run = session.run

    def failing(entry, inputs):
        session.cache[0, 2:] = 99  # half done
        raise RuntimeError("out of memory")

    session.run = failing
    with pytest.raises(RuntimeError):
        model.generate([5, 6, 9, 9], reuse_prefix=True)
    session.run = run
    prompt = [5, 6, 7, 8]
    assert model.generate(prompt, max_new_tokens=3, reuse_prefix=True).tokens == by_hand(prompt, 3)


# The model


def test_a_stream_left_early_frees_the_model():
    model = make(Counting())
    with model.stream([5]) as stream:
        with pytest.raises(RequestError, match="not read to its end"):
            _ = stream.generation
        next(stream)
        with pytest.raises(RequestError, match="busy with another call"):
            model.generate([5])
    assert model.generate([5], max_new_tokens=2).tokens == by_hand([5], 2)


def test_bad_options_are_refused_when_the_stream_is_made():
    model = make(Counting())
    with pytest.raises(RequestError, match="top_p is 0"):
        model.stream([5], top_p=0)
    with pytest.raises(RequestError, match="the prompt is empty"):
        model.stream([])


def test_without_a_tokenizer_ids_go_in_and_out():
    model = make(Counting(), text=TextFiles(), config={"eos_token_id": 7})
    result = model.generate([5], max_new_tokens=3)
    assert (result.tokens, result.text) == (by_hand([5], 3), "")
    assert model.end_ids == {7: ("config.eos_token_id",)}
    with pytest.raises(RequestError, match=r"the prompt must be token ids: .* no tokenizer"):
        model.generate("Hi")
    with pytest.raises(RequestError, match="stop texts need a tokenizer"):
        model.generate([5], stop="x")


def test_chat_goes_through_the_template():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}STOP"
    text = TextFiles(tokenizer=words().to_str(), chat_template=template)
    session = Counting()
    model = make(session, text=text)
    encoded = model.tokenizer.encode("é" + "STOP", add_special_tokens=False)
    message = [{"role": "user", "content": "é"}]
    assert model.chat_ids(message) == encoded
    assert model.chat(message, max_new_tokens=2).tokens == by_hand(encoded, 2)
    with model.chat_stream(message, max_new_tokens=2) as stream:
        assert "".join(stream) == stream.generation.text


@pytest.mark.parametrize(
    ("capabilities", "missing"), [(("cache",), "CHOICE"), (("choice", "forward"), "CACHE")]
)
def test_a_missing_capability_is_named(capabilities, missing):
    with pytest.raises(UnavailableError, match=f"counting backend cannot .* {missing}"):
        make(Counting(), capabilities=capabilities).generate([5])


def test_closing_and_showing():
    session = Counting()
    with make(session) as model:
        assert repr(model) == "<Model m: counting none, f32, cpu, 1 x 64>"
        with pytest.raises(UnavailableError, match="counting backend generates no source"):
            model.source()
    assert session.closed


def test_a_result_reads_as_its_text():
    result = scripted(" a", " b").generate([5], max_new_tokens=2)
    assert str(result) == " a b"
    assert 0 < result.first_token_s <= result.total_s
    assert result.decode_tok_s > 0
    assert scripted(" a").generate([5], max_new_tokens=1).decode_tok_s is None

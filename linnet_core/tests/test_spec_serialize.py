"""Programs as JSON and text: equal after a round trip; what is no program does not get in."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.errors import SpecError
from linnet.models.llama import Llama
from linnet.spec import Program, fingerprint, from_json, to_json, to_text
from linnet.spec.check import check
from linnet.testing.fixtures import f0_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def program_of(**changes: Any) -> Program:
    return Llama().program(f0_config(**changes))


VARIANTS: dict[str, dict[str, Any]] = {
    "f0": {},
    "tied": {"tie_word_embeddings": True},
    "eps": {"rms_norm_eps": 1e-6},
    "shape": {"intermediate_size": 81},
    "layers": {"num_hidden_layers": 2},
    "heads": {"num_key_value_heads": 3},
    "bias": {"mlp_bias": True},
    "window": {"sliding_window": 7},
    "window by layer": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "theta": {"rope_theta": 500001.0},
    "scaling": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_round_trip_gives_an_equal_program(name: str) -> None:
    program = program_of(**VARIANTS[name])
    text = to_json(program)
    again = from_json(text)
    assert again == program
    assert fingerprint(again) == fingerprint(program)
    assert to_json(again) == text
    assert to_text(again) == to_text(program)
    lines = [node.where for function in again.all_functions() for node in function.body]
    assert any(line.startswith("llama.py:") for line in lines)


def test_fingerprints_tell_meanings_apart() -> None:
    found = {name: fingerprint(program_of(**changes)) for name, changes in VARIANTS.items()}
    assert len(set(found.values())) == len(VARIANTS)
    assert found["f0"] == fingerprint(program_of(max_position_embeddings=64))


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "from linnet.models.llama import Llama\n"
        "from linnet.spec import fingerprint\n"
        "from linnet.testing.fixtures import f0_config\n"
        "print(fingerprint(Llama().program(f0_config())))"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == fingerprint(program_of())


def renamed(program: Program) -> Program:
    """The same program with other names for functions and values, and other lines."""

    def function(old: Any, *, entry: bool) -> Any:
        def value(v: Any) -> Any:
            return dataclasses.replace(v, name=f"v{v.index}")

        body = tuple(
            dataclasses.replace(
                node,
                inputs=tuple(map(value, node.inputs)),
                outputs=tuple(map(value, node.outputs)),
                attrs={
                    key: f"my_{attr}" if key == "function" else attr
                    for key, attr in node.attrs.items()
                },
                where="elsewhere.py:7",
            )
            for node in old.body
        )
        inputs = old.inputs if entry else tuple(map(value, old.inputs))
        name = old.name if entry else f"my_{old.name}"
        return dataclasses.replace(old, name=name, inputs=inputs, body=body)

    return dataclasses.replace(
        program,
        functions={f"my_{n}": function(f, entry=False) for n, f in program.functions.items()},
        entries={n: function(f, entry=True) for n, f in program.entries.items()},
    )


def test_a_fingerprint_is_blind_to_names_for_readers_and_to_lines() -> None:
    program = program_of()
    other = renamed(program)
    check(other)
    assert to_json(other) != to_json(program)
    assert fingerprint(other) == fingerprint(program)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(family="other"),
        lambda data: data["entries"][0].update(name="ahead"),
        lambda data: data["entries"][0]["inputs"][0].__setitem__(1, "ids"),
        lambda data: data["parameters"][0].update(role="linear"),
        lambda data: data["entries"].pop(),
    ],
)
def test_a_fingerprint_sees_what_callers_and_formats_use(change: Callable[[Any], None]) -> None:
    data = json.loads(to_json(program_of()))
    change(data)
    assert fingerprint(from_json(json.dumps(data))) != fingerprint(program_of())


# --- what is not a program --------------------------------------------------------------------


def small() -> dict[str, Any]:
    """One layer of F0, without its wordy entries."""
    data: dict[str, Any] = json.loads(to_json(program_of(num_hidden_layers=1)))
    data["entries"] = [e for e in data["entries"] if e["name"] in ("forward", "decode_sample")]
    check(from_json(json.dumps(data)))
    return data


SMALL = small()


def setting(op: str, **attrs: Any) -> Callable[[Any], None]:
    """Give every node of an op an attribute."""

    def change(data: Any) -> None:
        nodes = [n for f in data["functions"] + data["entries"] for n in f["body"]]
        found = [node for node in nodes if node["op"] == op]
        assert found, op
        for node in found:
            node["attrs"].update(attrs)

    return change


def inserting(op: str, inputs: list[int], output: list[Any], **attrs: Any) -> Callable[[Any], None]:
    """Put a node in front of the first entry."""

    def change(data: Any) -> None:
        node = {"op": op, "inputs": inputs, "outputs": [[10**6, "", *output]], "attrs": attrs}
        data["entries"][0]["body"].insert(0, node | {"where": ""})

    return change


DOUBLE = {"name": "forward", "inputs": [], "body": [], "outputs": []}

HOSTILE: list[tuple[Callable[[Any], None], str]] = [
    (lambda data: data.update(schema="linnet-program/2"), "this is 'linnet-program/2', not"),
    (lambda data: data.update(schema=["x" * 10**6]), "this is .{,200}, not"),
    (lambda data: data.pop("states"), "KeyError: 'states'"),
    (lambda data: data.update(parameters=7), "TypeError"),
    (lambda data: data["functions"].append(data["functions"][0]), "two functions are called"),
    (lambda data: data["entries"].append(DOUBLE), "two functions are called forward"),
    (setting("rms_norm", eps=float("nan")), "NaN is not a number that a program may hold"),
    (setting("rms_norm", eps=float("-inf")), "-Infinity is not a number that a program may hold"),
    (setting("rms_norm", eps=[1e-5]), r"eps is \(1e-05,\), not float"),
    (setting("rms_norm", eps=10**5000), "Exceeds the limit|too large"),
    (setting("rms_norm", eps=10**400), "eps is 1.*, not float"),
    (setting("sample", temperature=1), "temperature"),
    (setting("attention", window=-1), "the window is -1, not positive"),
    (setting("attention", window=True), r"window is True, not int \| None"),
    (setting("attention", scale=None), "scale is None, not float"),
    (setting("attention", groups=2), "unexpected keyword argument 'groups'"),
    (setting("rope_table", frequencies=[]), r"shape is \(0,\), not a tuple of sizes"),
    (setting("rope_table", frequencies=[[1.0]]), "not tuple"),
    (setting("rope_table", frequencies="1.0"), "not tuple"),
    (setting("reshape", shape=[10**30, 1]), "not a tuple of sizes"),
    (setting("reshape", shape=[-1]), "not a tuple of sizes"),
    (inserting("gumbel", [], ["f32", 1, 10**12], vocab=10**12), "missing a required argument"),
    (inserting("iota", [], ["i32", 10**12], size=10**12, dtype="i32"), "do not fit i32"),
    (
        inserting("constant", [], ["f32", 10**12], values=[1.0], dtype="f32", shape=[10**12]),
        "has 1 values for a shape of 1000000000000",
    ),
    (
        inserting("rope_table", [0], ["f32", "B", "S", 1], frequencies=[1.0]),
        r"gives f32\[B, S, 1\], f32\[B, S, 1\], but is declared as",
    ),
]


@pytest.mark.parametrize(("change", "complaint"), HOSTILE)
def test_what_is_no_program_is_refused(change: Callable[[Any], None], complaint: str) -> None:
    data = copy.deepcopy(SMALL)
    sys.set_int_max_str_digits(0)
    try:
        change(data)
        text = json.dumps(data)
    finally:
        sys.set_int_max_str_digits(4300)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(SpecError, match=complaint) as caught:
            from_json(text)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"linnet-program/1"',
        "{",
        "[" * 10**5,
        '{"schema":' * 10**5,
        "1" * 10**5,
        "\x00",
        '{"schema": "linnet-program/1"}',
        json.dumps(SMALL)[:-10],
        json.dumps(SMALL).replace('"attrs": {}', '"attrs": ' + "[" * 400 + "]" * 400, 1),
        json.dumps(SMALL).replace('"attrs": {}', '"attrs": {"a": ' + "[" * 90 + "]" * 90 + "}", 1),
    ],
)
def test_text_that_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        from_json(text)


def test_giant_sizes_build_types_alone() -> None:
    """Noise for 10^9 tokens, and for a symbolic batch: nothing is computed or allocated."""
    data = copy.deepcopy(SMALL)
    (decode,) = [entry for entry in data["entries"] if entry["name"] == "decode_sample"]
    seeds, positions = (
        next(value[0] for value in decode["inputs"] if value[1] == name)
        for name in ("seeds", "positions")
    )
    node = {"op": "gumbel", "inputs": [seeds, positions], "attrs": {"vocab": 10**9}, "where": ""}
    decode["body"].append(node | {"outputs": [[10**6, "", "f32", "R", 10**9]]})
    tracemalloc.start()
    try:
        from_json(json.dumps(data))
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


PLACES = list(places(SMALL))
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**31, max_value=2**80)
    | st.floats()
    | st.sampled_from(["", "B", "R", "f32", "float", "w", "layer", "mlp", "add", "call", "loop"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=250, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(PLACES), junk | st.sampled_from(PLACES)), min_size=1, max_size=2
    )
)
def test_a_mutated_program_is_refused_or_well_typed(changes: list[tuple[Any, Any]]) -> None:
    """A place gets junk, or what stands at another place."""
    data = copy.deepcopy(SMALL)
    for path, value in changes:
        try:
            new = copy.deepcopy(at(SMALL, value)) if isinstance(value, tuple) else value
            at(data, path[:-1])[path[-1]] = new
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change removed the place
    start = time.process_time()
    try:
        program = from_json(json.dumps(data))
    except SpecError:
        pass
    else:
        assert from_json(to_json(program)) == program
        assert fingerprint(from_json(to_json(program))) == fingerprint(program)
        to_text(program)
    assert time.process_time() - start < 2


def test_text_reads_top_down() -> None:
    text = to_text(program_of(tie_word_embeddings=True))
    assert text.startswith("program llama  # ")
    assert "parameter lm_head.weight: [136, 48] linear = model.embed_tokens.weight\n" in text
    assert "state model.layers.0.self_attn.cache.k: float[R, T, 2, 16]\n" in text
    assert "function layer(%0: float[B, S, 48] x, %1: f32[B, S, 8] cos" in text
    assert "function=layer, at=layers, start=0, stop=3)" in text
    assert "entry forward(%0: i32[B, S] tokens):\n" in text
    assert "... 8 in all" not in text
    wide = to_text(program_of(head_dim=64))
    assert "... 32 in all)" in wide

"""What entries refuse, in which words."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from linnet.errors import RequestError
from linnet.plugins.manager import plugin_manager
from linnet.runtime.requests import check_inputs
from linnet.spec import Program
from linnet.testing.fixtures import f0_config

ROWS, MAX_SEQ, VOCAB = 3, 32, 136


@pytest.fixture(scope="module")
def program() -> Program:
    manager = plugin_manager()
    return manager.implementation(manager.family("llama")).program(f0_config())


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def extend(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": np.array([[1, 2, 3, 4], [5, 6, 0, 0]], np.int32),
        "rows": ints(2, 0),
        "starts": ints(0, 9),
        "lengths": ints(4, 2),
    } | changes


def decode(**changes: Any) -> dict[str, Any]:
    return {"tokens": ints(1, 2, 3), "positions": ints(0, -1, 31)} | changes


def options(rows: int, **changes: Any) -> dict[str, Any]:
    return {
        "seeds": np.full(rows, -(2**31), np.int32),
        "temperature": floats(*[0.7] * rows),
        "top_k": np.full(rows, 2**31 - 1, np.int32),
        "top_p": floats(*[0.0] * rows),
        "min_p": floats(*[1.0] * rows),
    } | changes


GOOD: list[tuple[str, Mapping[str, Any]]] = [
    ("forward", {"tokens": np.zeros((1, 100), np.int32)}),
    ("extend", extend()),
    ("extend", extend(starts=ints(28, 30))),
    ("extend_greedy", extend()),
    ("extend_sample", {**extend(), **options(2)}),
    ("decode", decode()),
    ("decode", decode(positions=ints(-1, -9, -1))),
    ("decode_greedy", decode()),
    ("decode_sample", {**decode(), **options(3)}),
]

BAD: list[tuple[str, Mapping[str, Any], str]] = [
    ("generate", {}, "no entry 'generate'; there are forward, extend, decode,"),
    ("forward", {}, "forward misses tokens; its inputs are tokens"),
    ("extend", {"tokens": ints(1), "row": ints(1)}, "misses rows, starts, lengths and does not ta"),
    ("decode", decode(seeds=ints(1, 2, 3)), "decode does not take seeds"),
    ("decode", decode(tokens=[1, 2, 3]), "decode: tokens is a list, not a NumPy array"),
    ("decode", decode(tokens=np.array([1, 2, 3])), "decode: tokens is int64, not int32"),
    ("decode_sample", {**decode(), **options(3, top_p=np.ones(3))}, "top_p is float64, not float3"),
    ("forward", {"tokens": ints(1, 2)}, "forward: tokens has the shape (2,), not [B, S]"),
    ("forward", {"tokens": np.zeros((1, 0), np.int32)}, "axis 1 is 0, and must be 1 or more"),
    ("decode", {"tokens": ints(1), "positions": ints(0)}, "shape (1,), not [R]: axis 0 is 1, a"),
    ("extend", extend(starts=ints(0)), "starts has the shape (1,), not [B]: axis 0 is 1, and must"),
    ("forward", {"tokens": np.array([[136]], np.int32)}, "tokens has 136; token ids are from 0 to"),
    ("decode", decode(tokens=ints(1, -1, 2)), "tokens has -1; token ids are from 0 to 135"),
    ("extend", extend(rows=ints(1, 3)), "extend: rows has 3; cache rows are from 0 to 2"),
    ("extend", extend(rows=ints(1, -1)), "extend: rows has -1"),
    ("extend", extend(rows=ints(1, 1)), "rows [1, 1] name a cache row twice"),
    ("extend", extend(lengths=ints(4, 0)), "lengths has 0; numbers of tokens are from 1 to 4"),
    ("extend", extend(lengths=ints(5, 1)), "lengths has 5; numbers of tokens are from 1 to 4"),
    ("extend", extend(starts=ints(-1, 0)), "starts has -1; positions are from 0 to 31"),
    ("extend", extend(starts=ints(29, 0)), "starts 29 + lengths 4 is over the 32 positions"),
    ("extend", extend(starts=ints(2**31 - 1, 0)), "starts has 2147483647"),
    ("decode", decode(positions=ints(0, 32, 0)), "positions has 32, but a cache row has 32"),
    ("decode_sample", {**decode(), **options(3, temperature=floats(1, -1, 1))}, "ature has -1"),
    ("decode_sample", {**decode(), **options(3, temperature=floats(1, 1, np.nan))}, "has nan"),
    ("decode_sample", {**decode(), **options(3, temperature=floats(1, np.inf, 1))}, "has inf"),
    ("decode_sample", {**decode(), **options(3, top_k=ints(1, 1, -1))}, "top_k has -1"),
    ("decode_sample", {**decode(), **options(3, top_p=floats(1, 1, 1.5))}, "top_p has 1.5"),
    ("decode_sample", {**decode(), **options(3, min_p=floats(1, 1, np.nan))}, "min_p has nan"),
]


@pytest.mark.parametrize(("entry", "inputs"), GOOD)
def test_what_is_accepted(program: Program, entry: str, inputs: Mapping[str, Any]) -> None:
    check_inputs(program, ROWS, MAX_SEQ, VOCAB, entry, inputs)


@pytest.mark.parametrize(("entry", "inputs", "words"), BAD)
def test_what_is_refused(
    program: Program, entry: str, inputs: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        check_inputs(program, ROWS, MAX_SEQ, VOCAB, entry, inputs)


def test_an_idle_row_may_leave_its_options_at_zero(program: Program) -> None:
    zeros = {name: array * 0 for name, array in options(3).items()}
    check_inputs(program, ROWS, MAX_SEQ, VOCAB, "decode_sample", {**decode(), **zeros})

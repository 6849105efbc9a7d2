"""The rule of every primitive: what it gives, and what it says to inputs that do not fit."""

import re
from typing import Any

import pytest

from linnet.spec.attrs import Mismatch
from linnet.spec.ops import CALLS, PRIMITIVES, broadcast_shapes, infer
from linnet.spec.types import DType, TensorType


def types(text: str) -> tuple[TensorType, ...]:
    """``f32[B, 3] i32[]`` as types."""
    found = re.findall(r"(\w+)\[([^]]*)\]", text)
    return tuple(
        TensorType(
            DType(dtype),
            tuple(int(d) if d.isdecimal() else d for d in shape.replace(" ", "").split(",") if d),
        )
        for dtype, shape in found
    )


FITS: list[tuple[str, str, dict[str, Any], str]] = [
    ("parameter", "", {"path": "a.b", "shape": (2, 3)}, "float[2, 3]"),
    ("constant", "", {"values": (1, 2.5), "dtype": "f32", "shape": (2,)}, "f32[2]"),
    ("constant", "", {"values": (-128, 127), "dtype": "i8", "shape": (2, 1)}, "i8[2, 1]"),
    ("constant", "", {"values": (2**64 - 1,), "dtype": "u64", "shape": ()}, "u64[]"),
    ("constant", "", {"values": (True,), "dtype": "bool", "shape": ()}, "bool[]"),
    ("iota", "", {"size": "T", "dtype": "i32"}, "i32[T]"),
    ("iota", "", {"size": 256, "dtype": "u8"}, "u8[256]"),
    ("cast", "bool[B]", {"dtype": "f16"}, "f16[B]"),
    *((op, "float[B, 2]", {}, "float[B, 2]") for op in ("neg", "exp", "log", "rsqrt")),
    *((op, "f64[]", {}, "f64[]") for op in ("sin", "cos", "tanh", "erf")),
    *((op, "i32[B, 1] i32[3]", {}, "i32[B, 3]") for op in ("add", "sub", "mul")),
    ("div", "bf16[B, 1] bf16[3]", {}, "bf16[B, 3]"),
    *((op, "f32[] f32[S, T]", {}, "f32[S, T]") for op in ("maximum", "minimum")),
    *((op, "f32[B, 1, 2] f32[T, 1]", {}, "bool[B, T, 2]") for op in ("eq", "lt", "le")),
    ("and", "bool[B, 1] bool[S]", {}, "bool[B, S]"),
    ("xor", "u32[4] u32[1]", {}, "u32[4]"),
    ("shift_right", "u32[B] u32[]", {}, "u32[B]"),
    ("where", "bool[B, 1] f32[S] f32[]", {}, "f32[B, S]"),
    ("reshape", "f32[B, S, 6]", {"shape": ("S", 2, "B", 3)}, "f32[S, 2, B, 3]"),
    ("reshape", "f32[1]", {"shape": ()}, "f32[]"),
    ("broadcast", "f32[1, 3]", {"shape": ("B", 2, 3)}, "f32[B, 2, 3]"),
    ("transpose", "f32[B, 2, 3]", {"axes": (2, 0, 1)}, "f32[3, B, 2]"),
    ("slice", "f32[B, 8]", {"axis": -1, "start": 2, "stop": 8}, "f32[B, 6]"),
    ("concat", "i32[B, 1] i32[B, 2] i32[B, 3]", {"axis": 1}, "i32[B, 6]"),
    ("reduce_sum", "f32[B, S, 3]", {"axis": 1}, "f32[B, 1, 3]"),
    ("reduce_max", "i32[B, 3]", {"axis": -1}, "i32[B, 1]"),
    ("argmax", "f32[B, 9]", {}, "i32[B]"),
    ("sort", "f32[B, 9]", {}, "f32[B, 9]"),
    ("cumsum", "f32[B, T]", {}, "f32[B, T]"),
    ("matmul", "f32[B, 1, S, 4] f32[3, 4, T]", {}, "f32[B, 3, S, T]"),
    ("gather", "float[9, 4] i32[B, S]", {"axis": 0}, "float[B, S, 4]"),
    ("gather", "f32[B, S, 4] i32[B]", {"axis": 1}, "f32[B, 4]"),
    ("gather", "f32[B, 9] i32[B, 1]", {"axis": -1}, "f32[B, 1]"),
    ("state_read", "", {"state": "k", "shape": ("R", "T", 2, 8)}, "float[R, T, 2, 8]"),
    ("state_read", "i32[B]", {"state": "k", "shape": ("R", "T", 8)}, "float[B, T, 8]"),
    (
        "state_write",
        "float[B, S, 8] i32[B] i32[B] i32[B]",
        {"state": "k", "shape": ("R", "T", 8)},
        "",
    ),
    ("state_write", "float[R, 1] i32[R] i32[R]", {"state": "k", "shape": ("R", "T")}, ""),
]

SHAPE = {"state": "k", "shape": ("R", "T", 8)}
BREAKS: list[tuple[str, str, dict[str, Any], str]] = [
    ("parameter", "f32[2]", {"path": "a", "shape": (2,)}, "takes 0 inputs, not 1"),
    ("parameter", "", {"path": "a b", "shape": (2,)}, "path is 'a b', not a path"),
    ("parameter", "", {"path": "a", "shape": (0,)}, "shape is (0,), not a tuple of sizes"),
    ("parameter", "", {"path": "a", "shape": [2]}, "shape is [2], not a tuple of sizes"),
    ("parameter", "", {"path": "a", "shape": (2.0,)}, "shape is (2.0,), not a tuple of sizes"),
    ("parameter", "", {"path": "a", "shape": (True,)}, "shape is (True,), not a tuple of"),
    ("parameter", "", {"path": "a"}, "takes the attributes path, shape, not path"),
    ("constant", "", {"values": (1,), "dtype": "f32", "shape": (2,)}, "1 values for a shape of 2"),
    ("constant", "", {"values": (1,), "dtype": "f32", "shape": ("B",)}, "not the symbolic B"),
    ("constant", "", {"values": (0.5,), "dtype": "i32", "shape": ()}, "0.5 is not a value of i32"),
    ("constant", "", {"values": (2**31,), "dtype": "i32", "shape": ()}, "is not a value of i32"),
    ("constant", "", {"values": (-1,), "dtype": "u32", "shape": ()}, "-1 is not a value of u32"),
    ("constant", "", {"values": (True,), "dtype": "f32", "shape": ()}, "True is not a value of"),
    ("constant", "", {"values": (1,), "dtype": "bool", "shape": ()}, "1 is not a value of bool"),
    (
        "constant",
        "",
        {"values": (float("nan"),), "dtype": "f32", "shape": ()},
        "values is (nan,), not a tuple of finite numbers",
    ),
    ("constant", "", {"values": (1,), "dtype": "f8", "shape": ()}, "dtype is 'f8', not a dtype"),
    ("iota", "", {"size": 257, "dtype": "u8"}, "257 numbers from 0 on do not fit u8"),
    ("iota", "", {"size": 2, "dtype": "bool"}, "counts in numbers, not bool"),
    ("iota", "", {"size": -1, "dtype": "i32"}, "size is -1, not a size"),
    ("iota", "", {"size": "a b", "dtype": "i32"}, "size is 'a b', not a size"),
    ("cast", "f32[2] f32[2]", {"dtype": "f16"}, "takes 1 inputs, not 2"),
    ("cast", "f32[2]", {"dtype": ["f16"]}, "dtype is ['f16'], not a dtype"),
    *(
        (op, "i32[2]", {}, "takes a float dtype, not i32")
        for op in ("neg", "exp", "log", "rsqrt", "sin", "cos", "tanh", "erf")
    ),
    *(
        (op, inputs, {}, complaint)
        for op in ("add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt", "le")
        for inputs, complaint in (
            ("f32[2]", "takes 2 inputs, not 1"),
            ("f32[2] f16[2]", "dtypes f32 and f16 differ; cast one of them"),
            ("bool[2] bool[2]", "takes numbers, not bool"),
            ("f32[B, 48] f32[B, 80]", "sizes 48 and 80 at axis -1 do not broadcast"),
            ("f32[B, 1] f32[S, 1]", "sizes B and S at axis -2 do not broadcast"),
        )
    ),
    ("div", "i32[2] i32[2]", {}, "takes a float dtype, not i32"),
    ("and", "bool[2] u8[2]", {}, "dtypes bool and u8 differ"),
    ("and", "u8[2] u8[2]", {}, "takes bools, not u8"),
    ("xor", "i32[2] i32[2]", {}, "takes u32, not i32"),
    ("shift_right", "u32[2] u32[3]", {}, "sizes 2 and 3 at axis -1 do not broadcast"),
    ("where", "f32[2] f32[2] f32[2]", {}, "the condition is f32, not bool"),
    ("where", "bool[2] f32[2] i32[2]", {}, "dtypes f32 and i32 differ"),
    ("where", "bool[2] f32[2]", {}, "takes 3 inputs, not 2"),
    ("reshape", "f32[B, 6]", {"shape": ("B", 5)}, "['B', 6] and ['B', 5] do not hold as many"),
    ("reshape", "f32[B, 6]", {"shape": ("S", 6)}, "do not hold as many values"),
    ("reshape", "f32[B, B]", {"shape": ("B",)}, "do not hold as many values"),
    ("reshape", "f32[6]", {"shape": (-2, -3)}, "shape is (-2, -3), not a tuple of sizes"),
    ("broadcast", "f32[2]", {"shape": (1,)}, "[2] does not broadcast to [1]"),
    ("broadcast", "f32[2, 2]", {"shape": (2,)}, "[2, 2] does not broadcast to [2]"),
    ("transpose", "f32[2, 3]", {"axes": (0, 0)}, "axes [0, 0] do not permute [2, 3]"),
    ("transpose", "f32[2, 3]", {"axes": (0, -1)}, "axes [0, -1] do not permute"),
    ("transpose", "f32[2, 3]", {"axes": ("0", 1)}, "not a tuple of integers"),
    ("slice", "f32[S, 8]", {"axis": 0, "start": 0, "stop": 1}, "not the symbolic S"),
    ("slice", "f32[8]", {"axis": 0, "start": 0, "stop": 9}, "0:9 is outside an axis of 8"),
    ("slice", "f32[8]", {"axis": 0, "start": 3, "stop": 3}, "3:3 is outside an axis of 8"),
    ("slice", "f32[8]", {"axis": 0, "start": -2, "stop": 3}, "-2:3 is outside an axis of 8"),
    ("slice", "f32[8]", {"axis": 1, "start": 0, "stop": 3}, "axis 1 is outside a rank of 1"),
    ("slice", "f32[8]", {"axis": 0, "start": 0, "stop": 1.5}, "stop is 1.5, not an integer"),
    ("concat", "", {"axis": 0}, "takes at least one input"),
    ("concat", "f32[2] i32[2]", {"axis": 0}, "dtypes f32 and i32 differ"),
    ("concat", "f32[2, 3] f32[2, 4]", {"axis": 0}, "shapes differ outside axis 0"),
    ("concat", "f32[2] f32[2, 4]", {"axis": 0}, "shapes differ outside axis 0"),
    ("concat", "f32[S] f32[S]", {"axis": 0}, "a joined axis must be a fixed size"),
    ("reduce_sum", "bool[2]", {"axis": 0}, "takes numbers, not bool"),
    ("reduce_sum", "f32[2]", {"axis": True}, "axis is True, not an integer"),
    ("reduce_max", "f32[]", {"axis": 0}, "axis 0 is outside a rank of 0"),
    ("reduce_max", "f32[2]", {"axis": -2}, "axis -2 is outside a rank of 1"),
    *(
        (op, inputs, {}, complaint)
        for op in ("argmax", "sort", "cumsum")
        for inputs, complaint in (
            ("f32[]", "axis -1 is outside a rank of 0"),
            ("bool[2]", "takes numbers, not bool"),
            ("f32[2] f32[2]", "takes 1 inputs, not 2"),
        )
    ),
    ("sort", "f32[2]", {"axis": 0}, "takes the attributes none, not axis"),
    ("matmul", "f32[2, 3] f32[4, 2]", {}, "inner sizes 3 and 4 differ"),
    ("matmul", "f32[3] f32[3, 2]", {}, "takes at least two axes"),
    ("matmul", "f32[2, 3] bf16[3, 2]", {}, "dtypes f32 and bf16 differ"),
    ("matmul", "i8[2, 3] i8[3, 2]", {}, "takes a float dtype, not i8"),
    ("matmul", "f32[2, 2, 3] f32[4, 3, 2]", {}, "sizes 2 and 4 at axis -2 do not broadcast"),
    ("gather", "f32[9, 4] i64[2]", {"axis": 0}, "takes i32 indices, not i64"),
    ("gather", "f32[B, 9] i32[S, 1]", {"axis": 1}, "axes before axis 1 differ: ['B'] and ['S']"),
    ("gather", "f32[B, 9] i32[]", {"axis": 1}, "axes before axis 1 differ: ['B'] and []"),
    ("state_read", "f32[B]", SHAPE, "rows are i32[B], not f32[B]"),
    ("state_read", "i32[B, 1]", SHAPE, "rows are i32[B], not i32[B, 1]"),
    ("state_read", "", {"state": "k", "shape": ("R",)}, "lacks a row and a position axis"),
    ("state_write", "f32[B, S, 8] i32[B] i32[B] i32[B]", SHAPE, "values f32[B, S, 8] do not fit"),
    ("state_write", "float[B, S, 4] i32[B] i32[B] i32[B]", SHAPE, "['R', 'T', 8]"),
    ("state_write", "float[B] i32[B] i32[B]", {"state": "k", "shape": ("R", "T")}, "do not fit"),
    ("state_write", "float[B, S, 8] i32[S] i32[B] i32[B]", SHAPE, "starts must be i32[B], not"),
    ("state_write", "float[B, S, 8] i32[B] f32[B] i32[B]", SHAPE, "lengths must be i32[B], not f"),
    ("state_write", "float[B, S, 8] i32[B] i32[B] i32[R]", SHAPE, "rows must be i32[B], not i32"),
    ("state_write", "float[B, S, 8] i32[B] i32[B]", SHAPE, "must have a row for each of R"),
    ("state_write", "float[B, S, 8] i32[B]", SHAPE, "takes 3 or 4 inputs, not 2"),
    ("sqrt", "f32[2]", {}, "is not a primitive"),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "results"), FITS)
def test_a_rule_gives_the_types(op: str, inputs: str, attrs: dict[str, Any], results: str) -> None:
    assert infer(op, types(inputs), attrs) == types(results)


@pytest.mark.parametrize(("op", "inputs", "attrs", "complaint"), BREAKS)
def test_a_rule_says_what_is_wrong(
    op: str, inputs: str, attrs: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(Mismatch, match=re.escape(complaint)):
        infer(op, types(inputs), attrs)


def test_every_primitive_has_cases() -> None:
    assert {case[0] for case in FITS} == set(PRIMITIVES)
    assert {case[0] for case in BREAKS} == set(PRIMITIVES) | {"sqrt"}
    assert not set(CALLS) & set(PRIMITIVES)


def test_no_shapes_and_scalars_broadcast() -> None:
    assert broadcast_shapes((), ()) == ()
    assert broadcast_shapes((1,), (), ("B", 1)) == ("B", 1)


def test_types_print_and_have_sizes() -> None:
    assert str(types("float[B, S, 576]")[0]) == "float[B, S, 576]"
    assert [DType(name).itemsize for name in ("f64", "bf16", "i8", "bool")] == [8, 2, 1, 1]
    assert [dtype for dtype in DType if dtype.is_float] == ["float", "f64", "f32", "f16", "bf16"]
    with pytest.raises(ValueError, match="no size until a run chooses it"):
        _ = DType.FLOAT.itemsize

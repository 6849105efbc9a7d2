"""Programs broken by hand: every rule that a traced program keeps has one that breaks it."""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from linnet.errors import SpecError
from linnet.spec import Program, from_json, to_json
from linnet.spec.check import check

Json = dict[str, Any]


def node(op: str, inputs: list[int], outputs: list[Any], **attrs: Any) -> Json:
    return {"op": op, "inputs": inputs, "outputs": outputs, "attrs": attrs, "where": "toy.py:1"}


def good() -> Json:
    """Two scales in a loop, a head with a state and a tied weight."""
    x, w = [0, "x", "float", "R", 3], [1, "", "float", 3]
    state = {"state": "k", "shape": ["R", "T", 3]}
    scale = {
        "name": "scale",
        "inputs": [x],
        "body": [
            node("parameter", [], [w], path="w", shape=[3]),
            node("mul", [0, 1], [[2, "", "float", "R", 3]]),
        ],
        "outputs": [2],
    }
    head = {
        "name": "head",
        "inputs": [x, [1, "starts", "i32", "R"], [2, "lengths", "i32", "R"]],
        "body": [
            node("reshape", [0], [[3, "", "float", "R", 1, 3]], shape=["R", 1, 3]),
            node("state_write", [3, 1, 2], [], **state),
            node("state_read", [], [[4, "", "float", "R", "T", 3]], **state),
            node("iota", [], [[5, "", "i32", "T"]], size="T", dtype="i32"),
            node("parameter", [], [[6, "", "float", 3]], path="tied", shape=[3]),
            node("rms_norm", [0, 6], [[7, "", "float", "R", 3]], eps=1e-5),
        ],
        "outputs": [7],
    }
    main = {
        "name": "main",
        "inputs": [x, [1, "starts", "i32", "R"], [2, "lengths", "i32", "R"]],
        "body": [
            node(
                "loop", [0], [[3, "", "float", "R", 3]], function="scale", at="at", start=0, stop=2
            ),
            node("call", [3, 1, 2], [[4, "", "float", "R", 3]], function="head", at="head"),
        ],
        "outputs": [4],
    }
    return {
        "schema": "linnet-program/1",
        "family": "toy",
        "parameters": [
            {"path": "at.0.w", "shape": [3], "role": "scale", "tied_to": None, "parts": []},
            {"path": "at.1.w", "shape": [3], "role": "scale", "tied_to": None, "parts": []},
            {"path": "head.tied", "shape": [3], "role": "scale", "tied_to": "own", "parts": []},
            {"path": "own", "shape": [3], "role": "scale", "tied_to": None, "parts": []},
        ],
        "states": [{"path": "head.k", "type": ["float", "R", "T", 3]}],
        "functions": [scale, head],
        "entries": [main],
    }


SCALE, HEAD = 0, 1


def body(program: Json, function: int) -> list[Json]:
    return program["functions"][function]["body"]


def main(program: Json) -> Json:
    return program["entries"][0]


def put(*path: Any, value: Any) -> Callable[[Json], None]:
    """A change of one place."""

    def change(program: Json) -> None:
        place: Any = program
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def function(at: int, *path: Any, value: Any) -> Callable[[Json], None]:
    return put("functions", at, *path, value=value)


def entry(*path: Any, value: Any) -> Callable[[Json], None]:
    return put("entries", 0, *path, value=value)


def parameter(at: int, name: str, value: Any) -> Callable[[Json], None]:
    return put("parameters", at, name, value=value)


def drop(*path: Any) -> Callable[[Json], None]:
    def change(program: Json) -> None:
        place: Any = program
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change


def nest(program: Json) -> None:
    """Calls 40 deep, of functions that do nothing."""
    x = [0, "x", "i32", "B"]
    program["functions"].append({"name": "f0", "inputs": [x], "body": [], "outputs": [0]})
    for depth in range(1, 41):
        step = node("call", [0], [[1, "", "i32", "B"]], function=f"f{depth - 1}", at="a")
        program["functions"].append(
            {"name": f"f{depth}", "inputs": [x], "body": [step], "outputs": [1]}
        )


def billions(program: Json) -> None:
    """Loops of loops of loops, of functions that do nothing."""
    x = [0, "x", "i32", "B"]
    program["functions"].append({"name": "f0", "inputs": [x], "body": [], "outputs": [0]})
    for depth in range(1, 10):
        step = node(
            "loop",
            [0],
            [[1, "", "i32", "B"]],
            function=f"f{depth - 1}",
            at="a",
            start=0,
            stop=2**60,
        )
        program["functions"].append(
            {"name": f"f{depth}", "inputs": [x], "body": [step], "outputs": [1]}
        )
    step = node("call", [0], [[1, "", "i32", "B"]], function="f9", at="a")
    program["entries"].append({"name": "all", "inputs": [x], "body": [step], "outputs": [1]})


def first(program: Json, change: Json) -> None:
    program["parameters"].insert(0, change)


BREAKS: dict[str, tuple[Callable[[Json], None], str]] = {
    # names
    "family": (put("family", value="a b"), "'a b' cannot name a family"),
    "family is a number": (put("family", value=3), "3 cannot name a family"),
    "function name": (
        function(0, "name", value="x(): import os #"),
        r"'x\(\): import os #' cannot name a function",
    ),
    "keyword": (function(0, "name", value="lambda"), "'lambda' cannot name a function"),
    "entry name": (entry("name", value="é"), "'é' cannot name a function"),
    "value name": (function(0, "inputs", 0, 1, value="x\n"), r"cannot name a value of scale"),
    "line": (function(0, "body", 0, "where", value="a\nb"), r"'a\\nb' cannot name a line in scale"),
    "role": (parameter(0, "role", "a role"), "'a role' cannot name a role"),
    "parameter path": (parameter(0, "path", "at..w"), r"'at\.\.w' cannot name a parameter"),
    "tie": (parameter(2, "tied_to", ["own"]), r"\['own'\] cannot name a parameter"),
    "part": (parameter(0, "parts", ["a", "b c"]), "'b c' cannot name a parameter"),
    "state path": (put("states", 0, "path", value="'"), "cannot name a state"),
    "unnamed input": (entry("inputs", 0, 1, value=""), "inputs of entry main need a name each"),
    "same names": (entry("inputs", 0, 1, value="starts"), "need a name each"),
    # values
    "undefined": (
        function(0, "body", 1, "inputs", value=[0, 2]),
        "not the JSON of a program: KeyError: 2",
    ),
    "late": (
        lambda p: body(p, SCALE).reverse(),
        "not the JSON of a program: KeyError: 1",
    ),
    "twice": (
        function(0, "body", 1, "outputs", value=[[1, "", "float", "R", 3]]),
        "1 is not the index of a new value",
    ),
    "index": (function(0, "inputs", 0, 0, value=True), "True is not the index of a new value"),
    "negative index": (function(0, "inputs", 0, 0, value=-1), "-1 is not the index"),
    "dtype": (function(0, "inputs", 0, 2, value="f8"), "'f8' is not a valid DType"),
    "size": (function(0, "inputs", 0, 3, value=0), r"scale: float\[0, 3\] is no type for %0"),
    "symbol": (function(0, "inputs", 0, 3, value="a b"), "is no type for %0"),
    "nested size": (function(0, "inputs", 0, 3, value=["R"]), "is no type for %0"),
    # nodes
    "op": (
        function(0, "body", 1, "op", value="eval"),
        r"scale: eval\(float\[R, 3\], float\[3\]\): is neither a primitive.* \(toy\.py:1\)",
    ),
    "rule": (
        function(0, "body", 0, "attrs", "shape", value=[4]),
        r"parameter\(\): gives float\[4\], but is declared as float\[3\]",
    ),
    "declared": (
        function(0, "body", 1, "outputs", 0, 2, value="f32"),
        r"mul\(.*\): gives float\[R, 3\], but is declared as f32\[R, 3\]",
    ),
    "attributes": (
        function(0, "body", 1, "attrs", value={"fast": True}),
        "takes the attributes none, not fast",
    ),
    "composite attribute": (
        function(1, "body", 5, "attrs", "eps", value="__import__('os')"),
        "eps is .*, not float",
    ),
    "composite attributes": (
        function(1, "body", 5, "attrs", value={"x": 1, "eps": 1e-5}),
        "multiple values for argument 'x'",
    ),
    "composite attribute is an object": (
        function(1, "body", 5, "attrs", "eps", value={"a": 1}),
        "eps is {'a': 1}, not float",
    ),
    "composite inputs": (
        function(1, "body", 5, "inputs", value=[0]),
        "missing a required argument: 'scale'",
    ),
    "inside a composite": (
        function(1, "body", 5, "inputs", value=[0, 0]),
        r"the scale is float\[R, 3\], not \[3\]",
    ),
    "made-up size": (
        function(
            1, "body", 3, value=node("iota", [], [[5, "", "i32", "Q"]], size="Q", dtype="i32")
        ),
        "the size Q is on no input or state of it",
    ),
    "size too early": (
        lambda p: body(p, HEAD).insert(0, body(p, HEAD).pop(3)),
        "the size T is on no input or state of it",
    ),
    # calls
    "callee": (entry("body", 1, "attrs", "function", value="tail"), "no function 'tail' before it"),
    "order": (
        lambda p: body(p, SCALE).insert(
            0, node("call", [0], [[9, "", "float", "R", 3]], function="scale", at="a")
        ),
        "there is no function 'scale' before it",
    ),
    "arguments": (
        entry("body", 1, "inputs", value=[3, 1]),
        r"head takes float\[R, 3\], i32\[R\], i32\[R\]",
    ),
    "call attributes": (
        entry("body", 1, "attrs", "times", value=2),
        "takes the attributes at, function, not at, function, times",
    ),
    "call place": (entry("body", 1, "attrs", "at", value=""), "at is '', not a path"),
    "loop range": (entry("body", 0, "attrs", "stop", value=0), "0 to 0 is no range of blocks"),
    "loop start": (entry("body", 0, "attrs", "start", value=-1), "-1 to 2 is no range of blocks"),
    "loop bounds": (entry("body", 0, "attrs", "stop", value=2.0), "stop is 2.0, not an integer"),
    "loop results": (
        lambda p: (
            p["functions"][SCALE].update(outputs=[1]),
            main(p)["body"][0].update(outputs=[[3, "", "float", 3]]),
        ),
        "scale cannot be looped: its results are not its first inputs",
    ),
    "depth": (nest, "f33: calls nest 33 deep, more than 32"),
    "extent": (billions, r"written out, the entries have \d+ nodes, more than 10000000"),
    # declarations
    "parameter twice": (parameter(1, "path", "at.0.w"), "a parameter is declared twice"),
    "state twice": (
        lambda p: p["states"].append(p["states"][0]),
        "a state is declared twice",
    ),
    "parameter shape": (parameter(0, "shape", ["B"]), r"parameter at\.0\.w: \('B',\) is no shape"),
    "parameter size": (parameter(0, "shape", [-3]), r"parameter at\.0\.w: \(-3,\) is no shape"),
    "tie to nothing": (parameter(2, "tied_to", "gone"), "tied to 'gone', which stores nothing"),
    "tie to itself": (parameter(2, "tied_to", "head.tied"), "which stores nothing"),
    "tie to a tie": (
        lambda p: first(p, p["parameters"][2] | {"path": "x", "tied_to": "head.tied"}),
        r"parameter x is tied to 'head\.tied', which stores nothing",
    ),
    "tie of another shape": (
        parameter(3, "shape", [4]),
        r"parameter head\.tied \[3\] is tied to own, which is \[4\]",
    ),
    "state dtype": (
        put("states", 0, "type", 0, value="f32"),
        r"state head\.k is f32\[R, T, 3\], not float\[R, T, \.\.\.\]",
    ),
    "state axes": (put("states", 0, "type", 1, value="B"), r"state head\.k is float\[B, T, 3\]"),
    "state size": (put("states", 0, "type", 3, value="D"), r"state head\.k is float\[R, T, D\]"),
    # what is reached
    "missing parameter": (
        drop("parameters", 1),
        r"scale: parameter\(\): there is no parameter at\.1",
    ),
    "missing state": (drop("states", 0), r"state_write\(.*\): there is no state head\.k"),
    "other shape": (
        parameter(0, "shape", [2]),
        r"parameter\(\): parameter at\.0\.w is \[2\], not \[3\]",
    ),
    "unused parameter": (
        lambda p: first(p, p["parameters"][0] | {"path": "idle"}),
        "parameter idle is declared but never used",
    ),
    "unused state": (
        lambda p: p["states"].append(p["states"][0] | {"path": "idle"}),
        "state idle is declared but never used",
    ),
    "loop too far": (entry("body", 0, "attrs", "stop", value=10**6), r"no parameter at\.2\.w"),
}


def test_the_good_program_is_good() -> None:
    program = from_json(json.dumps(good()))
    assert from_json(to_json(program)) == program


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_program_is_refused(name: str) -> None:
    change, complaint = BREAKS[name]
    data = good()
    change(data)
    text = json.dumps(data)
    start = time.process_time()
    with pytest.raises(SpecError, match=complaint):
        from_json(text)
    assert time.process_time() - start < 1


def test_the_key_of_a_function_is_its_name() -> None:
    program = from_json(json.dumps(good()))
    functions = {"other" if name == "scale" else name: f for name, f in program.functions.items()}
    with pytest.raises(SpecError, match="'other' cannot name a function"):
        check(dataclasses.replace(program, functions=functions))


def test_a_value_of_another_function_is_not_defined_here() -> None:
    program: Program = from_json(json.dumps(good()))
    (entry_,) = program.entries.values()
    foreign = dataclasses.replace(program.functions["head"].body[0].outputs[0], index=40)
    for change, complaint in (
        ({"outputs": (foreign,)}, "main: its result %40 is not defined"),
        (
            {"body": (dataclasses.replace(entry_.body[0], inputs=(foreign,)), entry_.body[1])},
            r"main: loop\(.*\): %40 is not defined before it is used",
        ),
        ({"inputs": (*entry_.inputs, entry_.body[0].outputs[0])}, "main: a value is defined twice"),
    ):
        broken = dataclasses.replace(entry_, **change)
        if "twice" in complaint:
            named = dataclasses.replace(broken.inputs[-1], name="again")
            broken = dataclasses.replace(broken, inputs=(*broken.inputs[:-1], named))
        with pytest.raises(SpecError, match=complaint):
            check(dataclasses.replace(program, entries={"main": broken}))

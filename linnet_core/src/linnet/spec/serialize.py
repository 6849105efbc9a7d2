"""Programs as text and as JSON, and the fingerprint.

JSON is data alone: reading it runs no code, and a program read back is checked like a traced one.
"""

import dataclasses
import hashlib
import json
from reprlib import repr as short
from typing import Any

from linnet.errors import SpecError
from linnet.spec.attrs import is_int
from linnet.spec.check import check
from linnet.spec.program import Function, Node, Parameter, Program, State, Value
from linnet.spec.types import DType, TensorType

SCHEMA = "linnet-program/1"


def to_json(program: Program) -> str:
    """The program as JSON. Source lines are kept, for error messages."""
    return json.dumps(_program(program), indent=1)


def from_json(text: str) -> Program:
    """A program from its JSON. Raises SpecError for anything that is not a well-typed program."""
    try:
        data = json.loads(text, parse_constant=_not_finite)
        if data["schema"] != SCHEMA:
            raise SpecError(f"this is {short(data['schema'])}, not {SCHEMA!r}")
        program = Program(
            family=data["family"],
            parameters=tuple(
                Parameter(p["path"], tuple(p["shape"]), p["role"], p["tied_to"], tuple(p["parts"]))
                for p in data["parameters"]
            ),
            states=tuple(State(s["path"], _read_type(s["type"])) for s in data["states"]),
            functions=_read_functions(data["functions"]),
            entries=_read_functions(data["entries"]),
        )
    except SpecError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SpecError(f"not the JSON of a program: {type(error).__name__}: {error}") from None
    check(program)
    return program


def _not_finite(number: str) -> None:
    raise SpecError(f"{number} is not a number that a program may hold")


def fingerprint(program: Program) -> str:
    """SHA-256 over what the program means.

    Source lines do not count, nor do names for readers: those of functions and of values inside
    them. Names of entries and of their inputs do, since callers use them.
    """
    data = _program(_anonymous(program))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _anonymous(program: Program) -> Program:
    numbers = {name: f"f{number}" for number, name in enumerate(program.functions)}

    def value(named: Value) -> Value:
        return dataclasses.replace(named, name="")

    def node(named: Node) -> Node:
        called = named.attrs.get("function")
        attrs = named.attrs if called is None else {**named.attrs, "function": numbers[called]}
        return Node(named.op, named.inputs, tuple(map(value, named.outputs)), attrs)

    def function(named: Function) -> Function:
        return dataclasses.replace(named, body=tuple(map(node, named.body)))

    functions = {
        numbers[name]: dataclasses.replace(
            function(each), name=numbers[name], inputs=tuple(map(value, each.inputs))
        )
        for name, each in program.functions.items()
    }
    entries = {name: function(each) for name, each in program.entries.items()}
    return dataclasses.replace(program, functions=functions, entries=entries)


def _program(program: Program) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "family": program.family,
        "parameters": [dataclasses.asdict(p) for p in program.parameters],
        "states": [{"path": s.path, "type": _type(s.type)} for s in program.states],
        "functions": [_function(f) for f in program.functions.values()],
        "entries": [_function(f) for f in program.entries.values()],
    }


def _type(type_: TensorType) -> list[Any]:
    return [str(type_.dtype), *type_.shape]


def _function(function: Function) -> dict[str, Any]:
    def value(v: Value) -> list[Any]:
        return [v.index, v.name, *_type(v.type)]

    return {
        "name": function.name,
        "inputs": [value(v) for v in function.inputs],
        "body": [
            {
                "op": node.op,
                "inputs": [v.index for v in node.inputs],
                "outputs": [value(v) for v in node.outputs],
                "attrs": dict(node.attrs),
                "where": node.where,
            }
            for node in function.body
        ],
        "outputs": [v.index for v in function.outputs],
    }


def _read_type(data: list[Any]) -> TensorType:
    dtype, *shape = data
    return TensorType(DType(dtype), tuple(shape))


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise TypeError(f"{short(data)} is not a string")
    return data


def _tuples(data: Any) -> Any:
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data


def _read_functions(data: list[dict[str, Any]]) -> dict[str, Function]:
    functions: dict[str, Function] = {}
    for item in data:
        function = _read_function(item)
        if functions.setdefault(function.name, function) is not function:
            raise ValueError(f"two functions are called {function.name}")
    return functions


def _read_function(data: dict[str, Any]) -> Function:
    values: dict[int, Value] = {}

    def define(item: list[Any]) -> Value:
        index, name, *type_ = item
        if not is_int(index) or index < 0 or index in values:
            raise ValueError(f"{short(index)} is not the index of a new value")
        values[index] = Value(index, _read_type(type_), _text(name))
        return values[index]

    inputs = tuple(define(item) for item in data["inputs"])
    body = []
    for node in data["body"]:
        operands = tuple(values[index] for index in node["inputs"])
        outputs = tuple(define(item) for item in node["outputs"])
        attrs = {name: _tuples(attr) for name, attr in node["attrs"].items()}
        body.append(Node(_text(node["op"]), operands, outputs, attrs, _text(node["where"])))
    outputs = tuple(values[index] for index in data["outputs"])
    return Function(_text(data["name"]), inputs, tuple(body), outputs)


def to_text(program: Program) -> str:
    """The program for people: parameters and states by place, functions line by line."""
    lines = [f"program {program.family}  # {program.parameter_count:,} parameters", ""]
    for parameter in program.parameters:
        tie = f" = {parameter.tied_to}" if parameter.tied_to else ""
        lines.append(f"parameter {parameter.path}: {list(parameter.shape)} {parameter.role}{tie}")
    lines += [f"state {state.path}: {state.type}" for state in program.states]
    for function in program.functions.values():
        lines += ["", *function_text(function, "function")]
    for function in program.entries.values():
        lines += ["", *function_text(function, "entry")]
    return "\n".join(lines) + "\n"


def function_text(function: Function, kind: str = "function") -> list[str]:
    """One function, a line for each node."""

    def define(value: Value) -> str:
        return f"%{value.index}: {value.type}"

    def use(value: Value) -> str:
        return f"%{value.index}"

    named = ", ".join(f"{define(v)} {v.name}".rstrip() for v in function.inputs)
    lines = [f"{kind} {function.name}({named}):"]
    for node in function.body:
        results = ", ".join(map(define, node.outputs))
        attrs = ", ".join(f"{name}={_short(attr)}" for name, attr in node.attrs.items())
        operands = ", ".join(filter(None, [*map(use, node.inputs), attrs]))
        call = f"{node.op}({operands})"
        lines.append(f"    {results} = {call}" if results else f"    {call}")
    lines.append(f"    return {', '.join(map(use, function.outputs))}")
    return lines


def _short(attr: Any) -> str:
    if isinstance(attr, tuple) and len(attr) > 8:
        return f"({', '.join(map(str, attr[:3]))}, ... {len(attr)} in all)"
    return str(attr)

"""Programs as text and as JSON, and the fingerprint.

JSON is data alone: reading it runs no code, and a program read back is checked like a traced one.
"""

import dataclasses
import hashlib
import json
from typing import Any

from linnet.errors import SpecError
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
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise SpecError(f"this is {data['schema']!r}, not {SCHEMA!r}")
        program = Program(
            family=str(data["family"]),
            parameters=tuple(
                Parameter(
                    p["path"],
                    tuple(p["shape"]),
                    p["role"],
                    p.get("tied_to"),
                    tuple(p.get("parts", ())),
                )
                for p in data["parameters"]
            ),
            states=tuple(State(s["path"], _read_type(s["type"])) for s in data["states"]),
            functions={f["name"]: _read_function(f) for f in data["functions"]},
            entries={f["name"]: _read_function(f) for f in data["entries"]},
        )
    except SpecError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SpecError(f"not the JSON of a program: {type(error).__name__}: {error}") from None
    check(program)
    return program


def fingerprint(program: Program) -> str:
    """SHA-256 over what the program means: names for readers and source lines do not count."""
    data = _program(program, meaning_only=True)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _program(program: Program, *, meaning_only: bool = False) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "family": program.family,
        "parameters": [dataclasses.asdict(p) for p in program.parameters],
        "states": [{"path": s.path, "type": _type(s.type)} for s in program.states],
        "functions": [_function(f, meaning_only) for f in program.functions.values()],
        "entries": [_function(f, meaning_only) for f in program.entries.values()],
    }


def _type(type_: TensorType) -> list[Any]:
    return [str(type_.dtype), *type_.shape]


def _function(function: Function, meaning_only: bool) -> dict[str, Any]:
    def value(v: Value) -> list[Any]:
        return [v.index, *_type(v.type)] if meaning_only else [v.index, v.name, *_type(v.type)]

    return {
        "name": function.name,
        "inputs": [value(v) for v in function.inputs],
        "body": [
            {
                "op": node.op,
                "inputs": [v.index for v in node.inputs],
                "outputs": [value(v) for v in node.outputs],
                "attrs": dict(node.attrs),
                **({} if meaning_only else {"where": node.where}),
            }
            for node in function.body
        ],
        "outputs": [v.index for v in function.outputs],
    }


def _read_type(data: list[Any]) -> TensorType:
    dtype, *shape = data
    for size in shape:
        if not isinstance(size, str) and (type(size) is not int or size < 0):
            raise SpecError(f"{size!r} is not a size")
    return TensorType(DType(dtype), tuple(shape))


def _tuples(data: Any) -> Any:
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data


def _read_function(data: dict[str, Any]) -> Function:
    values: dict[int, Value] = {}

    def define(item: list[Any]) -> Value:
        index, name, *type_ = item
        value = Value(index, _read_type(type_), name)
        values[index] = value
        return value

    inputs = tuple(define(item) for item in data["inputs"])
    body = []
    for node in data["body"]:
        operands = tuple(values[index] for index in node["inputs"])
        outputs = tuple(define(item) for item in node["outputs"])
        attrs = {name: _tuples(attr) for name, attr in node["attrs"].items()}
        body.append(Node(node["op"], operands, outputs, attrs, node.get("where", "")))
    outputs = tuple(values[index] for index in data["outputs"])
    return Function(data["name"], inputs, tuple(body), outputs)


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

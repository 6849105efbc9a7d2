"""From a program to one file of readable jax.numpy.

One function for each kind of block, weights and caches as trees beside the tensors. A function
that writes caches puts the new arrays into the tree it was given; an entry makes a tree of its
own first and returns it, so that entries are pure. Knows nothing of sessions.
"""

import ast
import keyword
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files

from linnet.spec.layout import WIDTH
from linnet.spec.passes.expand import expand
from linnet.spec.paths import attribute, joins, loops
from linnet.spec.program import Function, Node, Program, Value
from linnet.spec.types import DType
from linnet_jax.expressions import CLAIMED, DTYPES, expression

INHERIT = {"reshape", "rope", "transpose", "cast", "slice", "broadcast", "add", "sub", "mul", "neg"}
"""Ops whose result is called what their first operand is."""
RESERVED = {"w", "state", "end", "jax", "jnp", "lax", "math", "nest", "weights", "caches"}
NAMES = {
    "rms_norm": "h",
    "layer_norm": "h",
    "attention": "y",
    "matmul": "y",
    "greedy": "tokens",
    "sample": "tokens",
    "constant": "number",
}


def generate(program: Program, numerics: str = "fast", dtype: DType = DType.F32) -> str:
    """The file, as text. ``numerics='exact'`` writes every composite out in primitives."""
    claimed = CLAIMED if numerics == "fast" else ()
    program = expand(program, claimed)
    writes = _stateful(program)
    bodies = [_Writer(program, f, writes).block() for f in program.functions.values()]
    bodies += [_Writer(program, f, writes).entry() for f in program.entries.values()]
    body = "\n\n\n".join(bodies)
    joined = {"join"} if any(p.parts for p in program.parameters) else set()
    helpers = _helpers({"Tree", "nest", "PLATFORM", *joined, *_names(body)})
    parts = [
        _header(program, dtype),
        _imports("\n".join([*helpers, body])),
        f"FLOAT = {DTYPES[dtype]}  # what weights and caches are in",
        *helpers,
        _weights(program),
        *([_caches(program)] if program.states else []),
        body,
    ]
    head, rest = parts[:3], parts[3:]
    return "\n\n".join(head) + "\n\n\n" + "\n\n\n".join(rest) + "\n"


def stored(program: Program) -> list[str]:
    """The paths of the stored weights in the order of the manifest; tied ones are not stored."""
    return [p.path for p in program.parameters if p.tied_to is None]


def _stateful(program: Program) -> dict[str, bool]:
    """For each function whether it reads or writes states, itself or through calls."""
    known: dict[str, bool] = {}
    for function in program.all_functions():
        known[function.name] = any(
            node.op in ("state_read", "state_write")
            or known.get(str(node.attrs.get("function")), False)
            for node in function.body
        )
    return known


class _Writer:
    """Writes one function."""

    def __init__(self, program: Program, function: Function, stateful: Mapping[str, bool]) -> None:
        # Names are given in order, and given again once what had them is no longer used.
        self.function, self.stateful = function, stateful
        self.names: dict[int, str] = {}
        self.taken: dict[str, int] = {}
        self.blocked = {*RESERVED, *program.functions, *program.entries, *_HELPERS}
        self.place = -1
        self.last = {v.index: i for i, node in enumerate(function.body) for v in node.inputs}
        self.last |= {value.index: len(function.body) for value in function.outputs}
        self.stems = _stems(function)
        self.sizes: dict[str, str] = {}
        self.lines: list[str] = []
        self.arguments = [self.name(value, "x") for value in function.inputs]

    def name(self, value: Value, base: str) -> str:
        """A name for a value: its hint or ``base``, numbered while another value lives there."""
        base = value.name if value.name.isidentifier() else base
        base = f"{base}_" if keyword.iskeyword(base) or base in self.blocked else base
        name, count = base, 1
        while name in self.taken and self.last.get(self.taken[name], -1) > self.place:
            count += 1
            name = f"{base}{count}"
        self.taken[name] = value.index
        self.names[value.index] = name
        return name

    def function_head(self, keywords: Sequence[str], result: str) -> str:
        roots = ["w: Any"] + ["state: Any"] * self.stateful[self.function.name]
        arguments = [*roots, *(f"{name}: Array" for name in self.arguments), *keywords]
        line = f"def {self.function.name}({', '.join(arguments)}) -> {result}:"
        if len(line) <= WIDTH:
            return line
        inner = ", ".join(arguments)
        if len(inner) + 4 <= WIDTH:
            return f"def {self.function.name}(\n    {inner}\n) -> {result}:"
        lines = "".join(f"    {argument},\n" for argument in arguments)
        return f"def {self.function.name}(\n{lines}) -> {result}:"

    def block(self) -> str:
        """A block's function."""
        count = len(self.function.outputs)
        result = "Array" if count == 1 else f"tuple[{', '.join(['Array'] * count)}]"
        keywords = ["*", "end: int"] * self.stateful[self.function.name]
        self.body()
        outputs = ", ".join(self.names[value.index] for value in self.function.outputs)
        head = self.function_head(keywords, result)
        return "\n".join([head, *self.lines, f"    return {outputs}"])

    def entry(self) -> str:
        """An entry: pure, so it copies the tree of caches and returns it."""
        if not self.stateful[self.function.name]:
            return self.block()
        self.lines.append(
            "    state = jax.tree.map(lambda cache: cache, state)  # a tree of its own"
        )
        self.body()
        outputs = ", ".join(self.names[value.index] for value in self.function.outputs)
        head = self.function_head(["*", "end: int"], "tuple[Array, Any]")
        return "\n".join([head, *self.lines, f"    return {outputs}, state"])

    def body(self) -> None:
        shapes = [
            f"{n}: {v.type}" for n, v in zip(self.arguments, self.function.inputs, strict=True)
        ]
        self.lines += textwrap.wrap(
            "; ".join(shapes), WIDTH - 6, initial_indent="    # ", subsequent_indent="    # "
        )
        for name, value in zip(self.arguments, self.function.inputs, strict=True):
            self.learn(name, value)
        for place, node in enumerate(self.function.body):
            self.place = place
            self.node(node)
        for size, line in self.sizes.items():
            at = self.lines.index(line)
            if not any(re.search(rf"\b{size}\b", later) for later in self.lines[at + 1 :]):
                del self.lines[at]

    def learn(self, name: str, value: Value) -> None:
        """Bind the symbolic sizes that a value shows first."""
        for axis, size in enumerate(value.type.shape):
            if isinstance(size, str) and size not in self.sizes:
                self.sizes[size] = f"    {size} = {name}.shape[{axis}]"
                self.lines.append(self.sizes[size])

    def node(self, node: Node) -> None:
        operands = [self.names[value.index] for value in node.inputs]
        attrs = node.attrs
        if node.op == "parameter":
            self.names[node.outputs[0].index] = _at("w", attrs["path"])
            return
        if node.op == "state_write":
            place = _at("state", attrs["state"])
            self.lines += _assign(place, f"write({', '.join([place, *operands])})")
            return
        if node.op == "state_read":
            name = self.name(node.outputs[0], attrs["state"].rpartition(".")[2])
            arguments = ", ".join([_at("state", attrs["state"]), "end", *operands])
            self.lines += _assign(name, f"read({arguments})")
        elif node.op in ("call", "loop"):
            self.call(node, operands)
        else:
            text = expression(node, operands)
            bases = self.bases(node, operands)
            names = [self.name(v, base) for v, base in zip(node.outputs, bases, strict=True)]
            self.lines += _assign(", ".join(names), text)
        for value in node.outputs:
            self.learn(self.names[value.index], value)

    def bases(self, node: Node, operands: Sequence[str]) -> Sequence[str]:
        """What the results of a node would best be called."""
        if node.op == "rope_table":
            return ("cos", "sin")
        if node.op == "slice" and (stems := self.stems.get(node.inputs[0].index)):
            return (stems.pop(0),)
        if node.op == "linear":
            owner = operands[1].removesuffix(".weight").rpartition(".")[2]
            return ("logits" if owner == "lm_head" else owner.removesuffix("_proj"),)
        if node.outputs[0].type.dtype is DType.BOOL:
            return ("mask",)
        if node.op in INHERIT:
            inherited = re.sub(r"\d+$", "", operands[0])
            return (inherited if inherited.isidentifier() else "x",)
        return (NAMES.get(node.op, "x"),)

    def call(self, node: Node, operands: list[str]) -> None:
        attrs = node.attrs
        callee = attrs["function"]
        stateful = self.stateful[callee]
        roots = [_at("w", attrs["at"])] + [_at("state", attrs["at"])] * stateful
        tail = ["end=end"] * stateful
        names = [self.name(value, "x") for value in node.outputs]
        if node.op == "call":
            arguments = ", ".join([*roots, *operands, *tail])
            self.lines += _assign(", ".join(names), f"{callee}({arguments})")
            return
        carried = operands[: len(names)]
        if names != carried:
            self.lines.append(f"    {', '.join(names)} = {', '.join(carried)}")
        span = str(attrs["stop"]) if not attrs["start"] else f"{attrs['start']}, {attrs['stop']}"
        self.lines.append(f"    for i in range({span}):")
        inner = ", ".join(
            [*(f"{root}[i]" for root in roots), *names, *operands[len(names) :], *tail]
        )
        self.lines += _assign(", ".join(names), f"{callee}({inner})", "        ")


def _stems(function: Function) -> dict[int, list[str]]:
    """For the result of each joined product what its slices are: ``["q", "k", "v"]``."""
    paths = {n.outputs[0].index: n.attrs["path"] for n in function.body if n.op == "parameter"}
    stems = {}
    for node in function.body:
        path = paths.get(node.inputs[1].index, "") if node.op == "linear" else ""
        if "+" in path:
            owners = path.rpartition(".")[0].rpartition(".")[2].split("+")
            stems[node.outputs[0].index] = [owner.removesuffix("_proj") for owner in owners]
    return stems


def _at(root: str, path: str) -> str:
    """``w.layers[0].norm`` for ``layers.0.norm``."""
    parts = [f"[{p}]" if p.isdecimal() else f".{p}" for p in attribute(path).split(".")]
    return root + "".join(parts if path else [])


def _assign(name: str, text: str, indent: str = "    ") -> list[str]:
    line = f"{indent}{name} = {text}"
    if len(line) <= WIDTH:
        return [line]
    # A call of many arguments: break it at its first parenthesis.
    head, _, inner = line.partition("(")
    inner = inner.removesuffix(")")
    return [
        f"{head}(",
        *textwrap.wrap(
            inner,
            WIDTH,
            initial_indent=indent + "    ",
            subsequent_indent=indent + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        ),
        f"{indent})",
    ]


# --- the rest of the file ---------------------------------------------------------------------


def _header(program: Program, dtype: DType) -> str:
    lines = [
        f'"""{program.family}, {program.parameter_count:,} parameters, in JAX.',
        "",
        "Linnet wrote this file from the model's program; it needs nothing but jax.",
        "",
        "    w = weights(safetensors.flax.load_file(path))  # or any arrays by these names",
    ]
    if {"extend_greedy", "decode_greedy"} <= set(program.entries):
        lines += [
            "    state, n = caches(1, 2048), tokens.shape[1]  # a prompt: tokens i32 [1, n]",
            "    zero = jnp.zeros(1, jnp.int32)",
            "    token, state = extend_greedy(w, state, tokens, zero, zero, zero + n, end=n)",
            "    token, state = decode_greedy(w, state, token, zero + n, end=n + 1)",
        ]
    text = (
        "Entries are pure functions of a tree of weights `w` and a tree of caches `state`: they "
        "can be jitted (`end` is static: one past the last position in use, nothing beyond it is "
        "read), and `forward` can be differentiated and mapped. Sizes: B rows of a batch, S tokens "
        "of each, R cache rows, T positions of each."
    )
    return "\n".join([*lines, "", *textwrap.wrap(text, WIDTH), '"""'])


def _imports(text: str) -> str:
    names = _names(text)
    standard = [f"import {name}" for name in ("functools", "math") if name in names]
    standard += ["from types import SimpleNamespace", "from typing import Any"]
    jax = ["import jax", "import jax.numpy as jnp"]
    jax.append(f"from jax import {'Array, lax' if 'lax' in names else 'Array'}")
    return "\n".join(standard) + "\n\n" + "\n".join(jax)


def _weights(program: Program) -> str:
    lines = [
        "def weights(arrays: dict[str, Array]) -> Any:",
        '    """The tree of weights, of arrays by their names in the checkpoint."""',
        "    flat = {name: jnp.asarray(array, FLOAT) for name, array in arrays.items()}",
    ]
    lines += joins([p.path for p in program.parameters if p.parts])
    lines += [
        f'    flat["{p.path}"] = flat["{p.tied_to}"]'
        for p in program.parameters
        if p.tied_to is not None
    ]
    return "\n".join([*lines, "    return nest(flat)"])


def _caches(program: Program) -> str:
    lines = [
        "def caches(rows: int, positions: int) -> Any:",
        '    """Empty caches [R, T, ...]."""',
        "    flat = {}",
    ]
    lines += [
        "    # XLA's CPU updates integers in place, and not floats of two bytes: their bits, then.",
        '    bits = PLATFORM == "cpu" and FLOAT != jnp.float32',
        "    dtype = jnp.uint16 if bits else FLOAT",
    ]
    groups: dict[tuple[object, ...], list[str]] = {}
    for state in program.states:
        groups.setdefault(state.type.shape[2:], []).append(state.path)
    for shape, paths in groups.items():
        sizes = ", ".join(map(str, ("rows", "positions", *shape)))
        for loop, key, depth in loops(paths):
            lines += [*loop, f"{'    ' * depth}flat[{key}] = jnp.zeros(({sizes}), dtype)"]
    return "\n".join([*lines, "    return nest(flat)"])


# --- helpers ----------------------------------------------------------------------------------


def _read_helpers() -> dict[str, tuple[str, set[str]]]:
    """Every definition of ``helpers``: its text and the names it uses. A statement is its own."""
    text = files("linnet_jax").joinpath("helpers.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, tuple[str, set[str]]] = {}
    last = ""
    for node in ast.parse(text).body:
        above: list[ast.expr] = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in above)])
        part = "\n".join(lines[first - 1 : node.end_lineno])
        part = re.sub(r"  # type: ignore\[.*", "", part)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            last = node.name
            found[last] = (part, _names(part))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = (lines[node.lineno - 1], _names(part))
        elif isinstance(node, ast.Expr) and last:  # what registers the class above it
            found[last] = (f"{found[last][0]}\n\n\n{part}", found[last][1])
    return found


def _names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


_HELPERS = _read_helpers()


def _helpers(wanted: Iterable[str]) -> list[str]:
    """The wanted helpers and those that they use, in the order they are defined in."""

    def closure(names: Iterable[str], found: set[str]) -> Iterator[str]:
        for name in names:
            if name in _HELPERS and name not in found:
                found.add(name)
                yield from closure(_HELPERS[name][1], found)

    found: set[str] = set()
    list(closure(wanted, found))
    return [text for name, (text, _) in _HELPERS.items() if name in found]

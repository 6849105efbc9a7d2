"""One PyTorch file from a program: readable, formatted, and importable with torch alone."""

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from linnet.spec.layout import WIDTH, wrap
from linnet.spec.ops import CALLS
from linnet.spec.paths import joins, loops
from linnet.spec.program import Function, Program, Value
from linnet.spec.program import State as StateSpec
from linnet.spec.types import DType
from linnet_torch.lower import OPAQUE, STATE_OPS, lower, opaque_kind
from linnet_torch.lowerings import PLAIN, Lowering
from linnet_torch.ops import CLAIMED
from linnet_torch.writer import Needs, Requests, Writer, place, shape_text

ENTRIES = {
    "forward": ("Logits f32 [B, S, V] after every token; without a cache.",),
    "extend": (
        "Put prompts, or chunks of them, into cache rows; the logits f32 [B, V] that follow.",
        "Row rows[b] gets the first lengths[b] tokens, from position starts[b] on.",
    ),
    "decode": (
        "One token for every cache row; the logits f32 [R, V] that follow.",
        "A negative position marks a row as idle: nothing is written, its logits mean nothing.",
    ),
    "extend_greedy": ("`extend`, and the likeliest next token i32 [B].",),
    "decode_greedy": ("`decode`, and the likeliest next token i32 [R].",),
    "extend_sample": ("`extend`, and a next token i32 [B] drawn by each row's options.",),
    "decode_sample": ("`decode`, and a next token i32 [R] drawn by each row's options.",),
}

RESERVED = frozenset(
    ("w", "state", "i", "start", "end", "dtype", "torch", "functools", "F", "Tensor")
)
"""Names that no value may take."""

OPAQUE_TYPES = {"slots": "Slots", "visible": "Visible", "end": "int", "dtype": "torch.dtype"}


@dataclass(frozen=True)
class EntryInfo:
    """How an entry of the file is called, besides its tensors."""

    weights: bool
    state: bool
    keywords: tuple[str, ...]
    """Of ``start`` and ``end``."""
    rows_may_be_slice: bool


@dataclass(frozen=True)
class Source:
    """A generated file."""

    text: str
    entries: Mapping[str, EntryInfo]


def generate(program: Program, numerics: str = "fast", lowering: Lowering = PLAIN) -> Source:
    """The file for a program; ``exact`` writes every composite out in primitives."""
    claimed = CLAIMED if numerics == "fast" else ()
    lowered = lower(program, claimed, starts=lowering.starts)
    needs = _needs(lowered)
    infos = _entry_infos(lowered, needs)
    requests = Requests()
    available = _helper_sources("helpers")
    if lowering.helpers:
        available |= _helper_sources(lowering.helpers)
    reserved = RESERVED.union(available, lowered.functions, lowered.entries)
    keywords = {name: info.keywords for name, info in infos.items()}
    dtype = f"{place('w', program.parameters[0].path)}.dtype" if program.parameters else None
    blocks = []
    for function in lowered.all_functions():
        is_entry = function.name in lowered.entries
        writer = Writer(
            function,
            needs,
            keywords,
            requests,
            reserved,
            dtype if is_entry else None,
            lowering.rules,
        )
        body = writer.write()
        if is_entry:
            head = _entry_head(function, infos[function.name])
        else:
            head = _function_head(function, needs[function.name])
        blocks.append("\n".join([*head, *body]))
    blocks.append(_weights(program))
    requests.helpers |= {"Tree", "nest"}
    if any(parameter.parts for parameter in program.parameters):
        requests.helpers.add("join")
    if program.states:
        blocks.append(_caches(program.states))
    helpers = list(_closure(requests.helpers, available))
    text = "\n\n\n".join(
        [
            _header(program, lowered, numerics, lowering.needs),
            *([_constants(requests.constants)] if requests.constants else []),
            *(available[name].text for name in helpers if name != "Tree"),
            *blocks,
        ]
    )
    text = _imports(text, helpers) + "\n"
    return Source(text, infos)


# --- what functions need ----------------------------------------------------------------------


def _needs(program: Program) -> dict[str, Needs]:
    needs: dict[str, Needs] = {}
    for function in program.all_functions():
        weights = state = False
        for node in function.body:
            called = needs[node.attrs["function"]] if node.op in CALLS else None
            called = needs[node.attrs["entry"]] if node.op == "entry" else called
            weights |= node.op in ("parameter", "dtype") or bool(called and called.weights)
            state |= node.op in STATE_OPS or bool(called and called.state)
        needs[function.name] = Needs(weights, state)
    return needs


def _entry_infos(program: Program, needs: Mapping[str, Needs]) -> dict[str, EntryInfo]:
    infos: dict[str, EntryInfo] = {}
    for name, entry in program.entries.items():
        keywords: dict[str, None] = {}
        sliceable = True
        for node in entry.body:
            keywords |= {"start": None} if node.attrs.get("start") == "start" else {}
            keywords |= {"end": None} if node.op == "end" else {}
            if node.op == "entry":
                keywords |= dict.fromkeys(infos[node.attrs["entry"]].keywords)
                sliceable &= infos[node.attrs["entry"]].rows_may_be_slice
            elif node.op not in ("slots", "read"):
                sliceable &= all(value.name != "rows" for value in node.inputs)
        has_rows = any(value.name == "rows" for value in entry.inputs)
        infos[name] = EntryInfo(
            needs[name].weights,
            needs[name].state,
            tuple(key for key in ("start", "end") if key in keywords),
            has_rows and sliceable,
        )
    return infos


# --- heads ------------------------------------------------------------------------------------


def _roots(needs: Needs | EntryInfo) -> list[str]:
    return ["w: Tree"] * needs.weights + ["state: Tree"] * needs.state


def _function_head(function: Function, needs: Needs) -> list[str]:
    kinds = [
        OPAQUE_TYPES[opaque_kind(value)] if value.type == OPAQUE else "Tensor"
        for value in function.inputs
    ]
    tensors = [f"{v.name}: {kind}" for v, kind in zip(function.inputs, kinds, strict=True)]
    arguments = ", ".join([*_roots(needs), *tensors])
    head = wrap(f"def {function.name}({arguments}) -> {_result(function)}:")
    return [*head, *_shapes(function.inputs)]


def _result(function: Function) -> str:
    count = len(function.outputs)
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _entry_head(function: Function, info: EntryInfo) -> list[str]:
    tensors = [
        f"{value.name}: Tensor | slice"
        if value.name == "rows" and info.rows_may_be_slice
        else f"{value.name}: Tensor"
        for value in function.inputs
    ]
    keywords = ["*"] * bool(info.keywords)
    keywords += ["start: int | None = None"] * ("start" in info.keywords)
    keywords += ["end: int"] * ("end" in info.keywords)
    arguments = ", ".join([*_roots(info), *tensors, *keywords])
    head = wrap(f"def {function.name}({arguments}) -> {_result(function)}:")
    summary, *more = ENTRIES.get(function.name, (f"The entry {function.name}.",))
    doc = [f'    """{summary}"""']
    if more:
        doc = [f'    """{summary}', "", *(f"    {line}" for line in more), '    """']
    return [*head, *doc, *_shapes(function.inputs)]


def _shapes(inputs: Sequence[Value]) -> list[str]:
    """A comment with the shapes of the inputs; dtypes where they are not the run's."""
    grouped: dict[str, list[str]] = {}
    for value in inputs:
        if value.type != OPAQUE:
            dtype = "" if value.type.dtype is DType.FLOAT else f"{value.type.dtype} "
            grouped.setdefault(f"{dtype}{shape_text(value)}", []).append(value.name)
    if not grouped:
        return []
    parts = [f"{', '.join(names)}: {shape}" for shape, names in grouped.items()]
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= WIDTH - 6:
            lines[-1] += f"; {part}"
        else:
            lines.append(part)
    return [f"    # {line}" for line in lines]


# --- the rest of the file ---------------------------------------------------------------------


def _header(program: Program, lowered: Program, numerics: str, needs: str) -> str:
    count = f"{program.parameter_count:,}"
    written = "" if numerics == "fast" else ", every composite written out in primitives"
    lines = [
        f'"""{program.family}, {count} parameters, in PyTorch{written}.',
        "",
        f"Linnet wrote this file from the model's program; it needs {needs}.",
    ]
    if program.states and {"extend_greedy", "decode_greedy"} <= set(lowered.entries):
        lines += [
            "",
            "    w = weights(tensors)  # by their names in the checkpoint",
            "    state = caches(1, 2048, dtype=torch.float32)",
            "    zero, n = torch.tensor([0]), tokens.shape[1]  # a prompt: tokens [1, n]",
            "    token = extend_greedy(w, state, tokens, zero, zero, zero + n, start=0, end=n)",
            "    token = decode_greedy(w, state, token, zero + n, start=n, end=n + 1)",
        ]
    lines += ["", *textwrap.wrap(_LEGEND if program.states else _LEGEND_STATELESS, WIDTH), '"""']
    return "\n".join(lines)


_LEGEND_STATELESS = (
    "`w` is a tree of weights, named as in the checkpoint. Sizes: B rows of a batch, S tokens of "
    "each."
)
_LEGEND = (
    "`w` is a tree of weights and `state` a tree of caches, which calls write to in place; both "
    "are named as in the checkpoint. Sizes: B rows of a batch, S tokens of each, R cache rows, T "
    "positions of each. A call names `end`, one past the last position in use: nothing beyond it "
    "is read. Where every row starts at one position and none has padding, `start` is that "
    "position, and masks are left out."
)


def _constants(constants: Mapping[tuple[float, ...], str]) -> str:
    blocks = []
    for values, name in constants.items():
        rows = textwrap.wrap(", ".join(map(repr, values)) + ",", WIDTH - 4)
        blocks.append("\n".join([f"{name} = (", *(f"    {row}" for row in rows), ")"]))
    return "\n".join(["# fmt: off", *blocks, "# fmt: on"])


def _weights(program: Program) -> str:
    tied = {p.path: p.tied_to for p in program.parameters if p.tied_to is not None}
    joined = [p.path for p in program.parameters if p.parts]
    lines = ["def weights(tensors: dict[str, Tensor]) -> Tree:"]
    lines.append('    """The tree of weights, of tensors by their names in the checkpoint."""')
    if tied or joined:
        lines.append("    flat = dict(tensors)")
    lines += joins(joined)
    lines += [f'    flat["{path}"] = flat["{other}"]' for path, other in tied.items()]
    lines.append(f"    return nest({'flat' if tied or joined else 'tensors'})")
    return "\n".join(lines)


def _caches(states: Sequence[StateSpec]) -> str:
    groups: dict[tuple[object, ...], list[str]] = {}
    for state in states:
        groups.setdefault(state.type.shape[2:], []).append(state.path)
    lines = wrap(
        "def caches(rows: int, positions: int, *, dtype: torch.dtype, "
        'device: torch.device | str = "cpu") -> Tree:'
    )
    lines.append('    """Empty caches; each row has one position more, which padding writes to."""')
    lines.append("    empty = functools.partial(torch.zeros, dtype=dtype, device=device)")
    lines.append("    flat = {}")
    for shape, paths in groups.items():
        sizes = ", ".join(["rows", "positions + 1", *map(str, shape)])
        for loop, key, depth in loops(paths):
            lines += loop
            lines += wrap(f"{'    ' * depth}flat[{key}] = empty({sizes})")
    return "\n".join([*lines, "    return nest(flat)"])


# --- helpers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Helper:
    text: str
    uses: frozenset[str]


def _helper_sources(module: str) -> dict[str, _Helper]:
    """Every definition of a module of helpers, as text, with the names it uses."""
    text = files("linnet_torch").joinpath(f"{module}.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    helpers = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        uses = frozenset(
            n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        )
        helpers[name] = _Helper("\n".join(lines[first - 1 : node.end_lineno]), uses)
    return helpers


def _closure(wanted: Iterable[str], available: Mapping[str, _Helper]) -> Iterator[str]:
    """The wanted helpers and those that they use, in the order they are defined in."""
    found: set[str] = set()
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in available and name not in found:
            found.add(name)
            waiting.extend(available[name].uses)
    for name in available:
        if name in found:
            yield name


def _imports(text: str, helpers: Sequence[str]) -> str:
    """The file with the imports it needs between its docstring and the rest."""
    end = text.index('"""', 3) + 3
    body = text[end:]
    standard = ["import functools"] * ("functools." in body)
    standard.append("from types import SimpleNamespace")
    typing = [name for name in ("Any", "NamedTuple") if f"{name}" in body]
    standard += [f"from typing import {', '.join(typing)}"] * bool(typing)
    torch = ["import torch"] * ("torch." in body)
    torch += ["import torch.nn.functional as F"] * ("F." in body)
    torch += ["from torch import Tensor"]
    parts = ["\n".join(standard), "\n".join(torch), "Tree = SimpleNamespace"]
    return text[:end] + "\n\n" + "\n\n".join(parts) + body

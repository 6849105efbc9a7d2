"""StableHLO, written from a program: one module for one entry at fixed sizes.

Every call and loop is written out. The module's ``main`` takes the stored weights in the order of
the manifest, then the states, then the entry's inputs; it gives the entry's result, then the
states, each in the buffer that it came in. Only ops of StableHLO itself are used, so that any of
its consumers reads the module. Knows nothing of JAX; what each op is, is in ``stablehlo_ops``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from linnet.spec.passes.expand import expand
from linnet.spec.passes.inline import inline_entry
from linnet.spec.program import CONTEXT, ROWS, Function, Node, Program
from linnet.spec.types import Dim, DType
from linnet_jax import stablehlo_ops as ops
from linnet_jax.stablehlo_ops import Module, Operand

CLAIMED = frozenset({"linear"})
"""The composites that have a lowering of their own; the others are written out in primitives."""
CLAIMED_WITHOUT_YNN = CLAIMED | {"attention"}
"""The same where YNN takes no sums, which is said for calls of few tokens on a CPU."""


@dataclass(frozen=True)
class Sizes:
    """What a module is written for."""

    dtype: DType
    rows: int
    """Cache rows, R."""
    max_seq: int
    """Positions of each."""
    end: int | None
    """How many of these are read; None for an entry that has no states."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of each input of the entry."""
    platform: str = "cpu"
    """What lowerings are chosen for."""
    ynn: bool = True
    """Whether XLA's CPU compiler may give sums to its YNN library, as it does unless told."""


def state_dtype(dtype: DType, platform: str) -> DType:
    """What states are kept in: XLA's CPU updates integers in place, and not two-byte floats."""
    return DType.U16 if platform == "cpu" and dtype in (DType.BF16, DType.F16) else dtype


def write_module(program: Program, entry: str, sizes: Sizes) -> str:
    """The text of one entry's module."""
    claimed = CLAIMED if sizes.ynn else CLAIMED_WITHOUT_YNN
    function = inline_entry(expand(program, claimed), entry)
    return _Writer(program, function, sizes).text()


class _Writer:
    def __init__(self, program: Program, function: Function, sizes: Sizes) -> None:
        self.program, self.function, self.given = program, function, sizes
        self.sizes: dict[Dim, int] = {ROWS: sizes.rows}
        if sizes.end is not None:
            self.sizes[CONTEXT] = sizes.end
        for value in function.inputs:
            for dim, size in zip(value.type.shape, sizes.shapes[value.name], strict=True):
                if isinstance(dim, str):
                    self.sizes.setdefault(dim, size)
        self.module = Module(sizes.dtype, sizes.platform, sizes.ynn)
        self.weights: dict[str, Operand] = {}
        self.states: dict[str, Operand] = {}
        self.values: dict[int, Operand] = {}

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        """Numbers for the sizes."""
        return tuple(self.sizes[d] if isinstance(d, str) else d for d in dims)

    def text(self) -> str:
        """The module."""
        arguments: list[str] = []

        def argument(shape: tuple[int, ...], dtype: DType, attrs: str, what: str) -> Operand:
            operand = Operand(f"%arg{len(arguments)}", shape, self.module.kind(str(dtype)))
            arguments.append(f'{operand.name}: {operand.type}{attrs} loc("{what}")')
            return operand

        for parameter in self.program.parameters:
            if parameter.tied_to is None:
                self.weights[parameter.path] = argument(
                    parameter.shape, DType.FLOAT, "", parameter.path
                )
        for parameter in self.program.parameters:
            if parameter.tied_to is not None:
                self.weights[parameter.path] = self.weights[parameter.tied_to]
        if self.given.end is not None:
            whole = self.sizes | {CONTEXT: self.given.max_seq}
            for number, state in enumerate(self.program.states):
                shape = tuple(whole[d] if isinstance(d, str) else d for d in state.type.shape)
                alias = f" {{tf.aliasing_output = {number + 1} : i32}}"
                dtype = state_dtype(self.given.dtype, self.given.platform)
                self.states[state.path] = argument(shape, dtype, alias, state.path)
        for value in self.function.inputs:
            self.values[value.index] = argument(
                self.shape(value.type.shape), value.type.dtype, "", value.name
            )

        for node in self.function.body:
            self.node(node)
        results = [self.values[value.index] for value in self.function.outputs]
        results += self.states.values()
        types = ", ".join(result.type for result in results)
        names = ", ".join(result.name for result in results)
        inner = ",\n      ".join(arguments)
        body = "\n".join(f"    {line}" for line in self.module.lines)
        name = f"{self.program.family}_{self.function.name}"
        return (
            f"module @{name} {{\n  func.func public @main(\n      {inner}\n  ) -> ({types}) {{\n"
            f"{body}\n    return {names} : {types}\n  }}\n}}\n"
        )

    def node(self, node: Node) -> None:
        """One op of the flat function."""
        operands = [self.values[value.index] for value in node.inputs]
        if node.op == "parameter":
            result = self.weights[node.attrs["path"]]
        elif node.op == "state_write":
            path = node.attrs["state"]
            self.states[path] = ops.write(self.module, self.states[path], *operands)
            return
        elif node.op == "state_read":
            end = self.sizes[CONTEXT]
            result = ops.read(self.module, self.states[node.attrs["state"]], end, *operands)
        else:
            value = node.outputs[0]
            result = ops.lower(
                self.module, node.op, operands, node.attrs, self.shape(value.type.shape)
            )
        self.values[node.outputs[0].index] = result

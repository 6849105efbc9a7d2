"""Blocks: the pieces a family is written in. A block owns parameters, states and other blocks.

Calling a block while a program is traced appends a call to its function; calling an inline block
(``class Linear(Block, inline=True)``) appends its ops to the caller. Arguments are tensors, None,
and frozen dataclasses of these.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from linnet.errors import SpecError
from linnet.spec import composites as ops
from linnet.spec.program import CONTEXT, ROWS
from linnet.spec.trace import Builder, Tensor, apply, building, current, perform, read
from linnet.spec.types import Dim


@dataclasses.dataclass(frozen=True, eq=False)
class Param:
    """A parameter, by shape and role (``linear``, ``embedding``, ``scale``, ``bias``)."""

    shape: tuple[int, ...]
    role: str
    tied_to: "Param | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A tensor that lives between calls: a row axis, a position axis, and ``shape``."""

    shape: tuple[int, ...]

    @property
    def full_shape(self) -> tuple[Dim, ...]:
        """``[R, T, *shape]``."""
        return (ROWS, CONTEXT, *self.shape)


class Block:
    """Base of all blocks."""

    def __init_subclass__(cls, inline: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__ and not inline:
            setattr(cls, "__call__", _traced_call(cls.__dict__["__call__"]))  # noqa: B010

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")


def walk(model: Block) -> Iterator[tuple[str, Block | Param | State]]:
    """Every parameter, state and sub-block with its path, in the order they were assigned.

    Raises SpecError for one that sits in two places.
    """
    places: dict[int, str] = {}

    def visit(thing: Any, path: str) -> Iterator[tuple[str, Block | Param | State]]:
        if isinstance(thing, list | tuple):
            for index, item in enumerate(thing):
                yield from visit(item, f"{path}.{index}")
        if not isinstance(thing, Block | Param | State):
            return
        if id(thing) in places:
            raise SpecError(
                f"one {type(thing).__name__} is at both {places[id(thing)] or 'the top'} "
                f"and {path}: call one attribute twice, or tie the parameters of two (tied_to)"
            )
        places[id(thing)] = path
        yield path, thing
        if isinstance(thing, Block):
            for name, item in vars(thing).items():
                yield from visit(item, f"{path}.{name}" if path else name)

    return visit(model, "")


def _traced_call(method: Callable[..., Any]) -> Callable[..., Any]:
    code = method.__code__
    hints, more = code.co_varnames[1 : code.co_argcount], itertools.repeat("")

    @functools.wraps(method)
    def call(self: Block, *args: Any) -> Any:
        outer = current()
        tracer = outer.tracer
        if tracer is None:
            raise outer.error("call", (), f"{type(self).__name__} called inside a composite")
        name = type(self).__name__
        prefix = tracer.path(self)
        inner = Builder(tracer, name, prefix)
        passed: list[Tensor] = []

        def enter(argument: Any, hint: str) -> Any:
            if isinstance(argument, Tensor):
                passed.append(argument)
                return inner.input(argument.type, hint)
            if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
                fields = dataclasses.fields(argument)
                values = {f.name: enter(getattr(argument, f.name), f.name) for f in fields}
                return dataclasses.replace(argument, **values)
            return argument

        with building(inner):
            entered = [
                enter(a, h) for a, h in zip(args, itertools.chain(hints, more), strict=False)
            ]
            result = method(self, *entered)
        outputs = result if isinstance(result, tuple) else (result,)
        function = tracer.intern(name, inner.finish(name, outputs))
        results = outer.emit(
            "call",
            passed,
            {"function": function, "at": outer.local(prefix)},
            [t.type for t in outputs],
        )
        return results if isinstance(result, tuple) else results[0]

    return call


class Linear(Block, inline=True):
    """``x[..., inputs]`` to ``[..., outputs]``; the weight is ``[outputs, inputs]``."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, tied_to: "Embedding | None" = None
    ) -> None:
        self.weight = Param((outputs, inputs), "linear", tied_to.weight if tied_to else None)
        self.bias = Param((outputs,), "bias") if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, read(self.weight), None if self.bias is None else read(self.bias))


class Embedding(Block, inline=True):
    """i32 ``ids[...]`` to ``[..., size]``."""

    def __init__(self, vocab: int, size: int) -> None:
        self.weight = Param((vocab, size), "embedding")

    def __call__(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, read(self.weight))


class RMSNorm(Block, inline=True):
    """See ``composites.rms_norm``."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = Param((size,), "scale")
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, read(self.weight), eps=self.eps)


class LayerNorm(Block, inline=True):
    """See ``composites.layer_norm``; with a bias."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = Param((size,), "scale")
        self.bias = Param((size,), "bias")
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, read(self.weight), read(self.bias), eps=self.eps)


@dataclasses.dataclass(frozen=True)
class Span:
    """Which positions a call covers.

    ``positions`` i32 ``[B, S]``. With a cache, ``starts`` and ``lengths`` i32 ``[B]`` say what is
    written where, and ``rows`` i32 ``[B]`` in which cache rows; without ``rows``, in every row in
    order. Without a cache all three are None.
    """

    positions: Tensor
    starts: Tensor | None = None
    lengths: Tensor | None = None
    rows: Tensor | None = None


class KVCache(Block, inline=True):
    """Keys and values of one layer, each ``[R, T, heads, size]``."""

    def __init__(self, heads: int, size: int) -> None:
        self.k = State((heads, size))
        self.v = State((heads, size))

    def __call__(self, k: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write ``[B, S, heads, size]``; what attention should read, ``[B, T, heads, size]``."""
        if span.starts is None or span.lengths is None:
            return k, v
        where = [span.starts, span.lengths]
        rows = [] if span.rows is None else [span.rows]
        return self._update(self.k, k, where, rows), self._update(self.v, v, where, rows)

    @staticmethod
    def _update(state: State, x: Tensor, where: list[Tensor], rows: list[Tensor]) -> Tensor:
        builder = current()
        if builder.tracer is None:
            raise builder.error("state_write", (), "a state used inside a composite")
        place = {"state": builder.local(builder.tracer.path(state)), "shape": state.full_shape}
        perform("state_write", x, *where, *rows, **place)
        return apply("state_read", *rows, **place)

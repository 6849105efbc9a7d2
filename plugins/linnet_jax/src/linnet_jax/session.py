"""A loaded model: weights and caches on a device, and one compiled program for each shape.

Knows what is run only as a ``Compiler``: the modes differ in nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Granted
from linnet.runtime.requests import check_inputs
from linnet.spec.program import CONTEXT, ROWS
from linnet.spec.types import Dim
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import dtype_of, numpy_dtype
from linnet_jax.buckets import pad
from linnet_jax.stablehlo import state_dtype

Arrays = list[jax.Array]


@dataclass(frozen=True)
class Step:
    """A loaded executable, called without what jax.jit does in each call, 2 ms of Python.

    Its parameters are the weights, the states, which are donated, and the inputs; its results are
    the entry's result and the new states.
    """

    executable: Any
    device: jax.Device

    def __call__(
        self, weights: Arrays, states: Arrays, inputs: Sequence[Array]
    ) -> tuple[jax.Array, Arrays]:
        """The entry's result and the new states."""
        arguments = [*weights, *states, *jax.device_put(list(inputs), self.device)]
        results = self.executable.execute_sharded(arguments)
        (result,), *rest = results.disassemble_into_single_device_arrays()
        return result, [state for (state,) in rest]


class Compiler(Protocol):
    """What a mode is."""

    @property
    def text(self) -> str:
        """What it compiles, for readers."""

    def compile(
        self, entry: str, weights: Arrays, states: Arrays, inputs: Sequence[Array], end: int | None
    ) -> Step:
        """One entry for these shapes; ``end`` is how much of the states is read."""


def _empty_row(states: Arrays, row: jax.Array) -> Arrays:
    """The states with zeros in one row."""
    return [state.at[row].set(0) for state in states]


class JaxSession:
    """Runs the entries of a program that a compiler makes executable."""

    def __init__(
        self,
        model: BoundModel,
        compiler: Compiler,
        weights: Mapping[str, jax.Array],
        device: jax.Device,
        granted: Granted,
    ) -> None:
        self._model, self._compiler, self._device = model, compiler, device
        self._weights: Arrays | None = list(weights.values())
        sizes: dict[Dim, Dim] = {ROWS: granted.rows, CONTEXT: granted.max_seq}
        dtype = self._weights[0].dtype
        kept = numpy_dtype(state_dtype(dtype_of(dtype), device.platform))
        self._states = [
            jax.device_put(np.zeros([sizes.get(d, d) for d in s.type.shape], kept), device)
            for s in model.program.states
        ]
        # What overflowed in f16 is infinite, and a masked position counts 0 times, which is NaN of
        # infinity: a row that starts anew is emptied.
        self._empty: Any = jax.jit(_empty_row, donate_argnums=0) if dtype == np.float16 else None
        self._steps: dict[tuple[object, ...], Step] = {}
        held = {str(d) for array in self._weights for d in array.devices()}
        if held != {str(device)}:
            raise UnavailableError(f"the weights are on {', '.join(held)}, not on {device}")
        self.granted = granted

    @property
    def compiled(self) -> int:
        """How many programs were compiled so far: one for each entry and shape that was met."""
        return len(self._steps)

    def run(self, entry: str, inputs: Mapping[str, Array]) -> Array:
        """Run one entry. Logits come back as float32, tokens as int32, in memory of their own.

        Raises RequestError for inputs that are not what the entry takes.
        """
        if self._weights is None:
            raise UnavailableError("this session is closed; load the model again")
        granted, program = self.granted, self._model.program
        check_inputs(program, granted.rows, granted.max_seq, self._model.vocab, entry, inputs)
        padded, end, answer = pad(inputs, granted.rows, granted.max_seq)
        arrays = [padded[value.name] for value in program.entries[entry].inputs]
        key = (entry, end, *(array.shape for array in arrays))
        step = self._steps.get(key)
        if step is None:
            states = self._states if end is not None else []
            step = self._compiler.compile(entry, self._weights, states, arrays, end)
            self._steps[key] = step
        if self._empty is not None and "starts" in inputs:
            for row, start in zip(inputs["rows"], inputs["starts"], strict=True):
                if start == 0:
                    self._states = self._empty(self._states, row)
        if end is None:
            result, _ = step(self._weights, [], arrays)
        else:
            result, self._states = step(self._weights, self._states, arrays)
        return np.array(result)[answer]

    def source(self) -> str:
        """What the compiler compiles."""
        return self._compiler.text

    def close(self) -> None:
        """Free weights and caches."""
        self._weights = None
        self._states = []
        self._steps = {}

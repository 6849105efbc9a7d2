"""Mode ``stablehlo``: the module that is written from the program, compiled by XLA through jaxlib.

JAX traces nothing here. Its compile cache is used, which is why this is its own way to compile
and not the client's.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler as xla
from jax._src.interpreters import mlir
from jaxlib import _jax
from jaxlib.mlir import ir

from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array
from linnet_jax.environment import WITHOUT_YNN, spares_ynn
from linnet_jax.session import Arrays, Step
from linnet_jax.stablehlo import Sizes, write_module


class ModuleCompiler:
    """Writes and compiles one module for each entry and shape."""

    def __init__(
        self, program: Program, dtype: DType, rows: int, max_seq: int, device: jax.Device
    ) -> None:
        self._program, self._dtype, self._device = program, dtype, device
        self._rows, self._max_seq = rows, max_seq

    @property
    def text(self) -> str:
        """The module of one decoding step, or of a forward pass where there is none."""
        names = self._program.entries
        entry = "decode_greedy" if "decode_greedy" in names else next(iter(names))
        shapes = {
            value.name: tuple({"R": self._rows}.get(str(d), 1) for d in value.type.shape)
            for value in names[entry].inputs
        }
        end = self._max_seq if self._program.states and entry != "forward" else None
        return self._write(entry, shapes, end, ynn=not spares_ynn(self._rows, self._device))

    def _write(
        self, entry: str, shapes: dict[str, tuple[int, ...]], end: int | None, *, ynn: bool
    ) -> str:
        platform = self._device.platform
        sizes = Sizes(self._dtype, self._rows, self._max_seq, end, shapes, platform, ynn)
        return write_module(self._program, entry, sizes)

    def compile(
        self, entry: str, weights: Arrays, states: Arrays, inputs: Sequence[Array], end: int | None
    ) -> Step:
        """One entry for these shapes."""
        names = [value.name for value in self._program.entries[entry].inputs]
        shapes = {name: array.shape for name, array in zip(names, inputs, strict=True)}
        spare = spares_ynn(inputs[0].size, self._device)
        text = self._write(entry, shapes, end, ynn=not spare)
        executable = compile_text(text, self._device, WITHOUT_YNN if spare else None)
        return Step(executable, self._device)


def compile_text(text: str, device: jax.Device, options: dict[str, Any] | None = None) -> Any:
    """The executable of a StableHLO module, ``options`` being XLA's own."""
    client = device.client
    settings = xla.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
        env_options_overrides=options,
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        devices = _jax.DeviceList((device,))
        return xla.compile_or_get_cached(client, module, np.array([device]), settings, [], devices)

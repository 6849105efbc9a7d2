"""A model's parameters as tensors of a file: cast, joined, and each read when it is needed."""

from collections.abc import Mapping

import numpy as np

from linnet.spec.program import Parameter, Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundParameter, read_parameter
from linnet.weights.checkpoint import Array
from linnet_onnx.graph import KINDS, Stored


class Weights:
    """What each parameter of a program is in the file; a tied one is the one it is tied to."""

    def __init__(
        self, program: Program, parameters: Mapping[str, BoundParameter], dtype: DType
    ) -> None:
        self._program = {p.path: p for p in program.parameters}
        self._bound, self._dtype = parameters, dtype

    def resolve(self, path: str) -> Parameter:
        """The parameter that holds the values of ``path``."""
        parameter = self._program[path]
        return self._program[parameter.tied_to] if parameter.tied_to is not None else parameter

    def plain(self, path: str) -> Stored:
        """The parameter in the graph's dtype."""
        p = self.resolve(path)
        return Stored(p.path, KINDS[self._dtype], p.shape, lambda: self._read(p, self._dtype))

    def f32(self, path: str) -> Array:
        """The values in f32, for an encoding."""
        return self._read(self.resolve(path), DType.F32)

    def _read(self, parameter: Parameter, dtype: DType) -> Array:
        """Raises CheckpointError for values that the dtype cannot hold, and for NaN or infinity."""
        return np.ascontiguousarray(read_parameter(parameter, self._bound, dtype))

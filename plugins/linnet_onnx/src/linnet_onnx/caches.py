"""A session's caches, and views of their rows as ONNX Runtime's values.

On a CPU a row is a view of one array, and goes in and out in the same memory. TensorRT does not let
an output lie where an input does: there the caches are there twice, and a call writes one side from
the other.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.weights.checkpoint import Array
from linnet_onnx.runtime import ort_value

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bfloat16)": np.uint16}
Values = dict[str, ort.OrtValue]


class Caches:
    """Zeros of these shapes, by the name that each has where it comes in.

    ``turns`` is whether there are two sides. Raises UnavailableError for more rows than a device
    has views of: on one that is not the CPU, a value is whole.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[str, Sequence[int]]], device: str, *, turns: bool = False
    ) -> None:
        self._device, self.side = device, 0
        rows = {shape[0] for _, shape in shapes.values()}
        if device != "cpu" and rows > {1}:
            raise UnavailableError(
                f"rows is {max(rows)}; on {device} the onnx backend has caches of 1 row"
            )
        self._arrays: list[dict[str, Array]] = []
        self._values: list[Values] = []
        for _ in range(2 if turns else 1):
            arrays = {name: np.zeros(shape, TYPES[kind]) for name, (kind, shape) in shapes.items()}
            self._arrays.append(arrays)
            if device != "cpu":
                values = {name: ort_value(array, device=device) for name, array in arrays.items()}
                self._values.append(values)

    @property
    def names(self) -> list[str]:
        """What the caches are called where they come in."""
        return list(self._arrays[0])

    def rows(self, start: int, stop: int) -> tuple[Values, Values]:
        """What comes in and what goes out for these rows, by the names of ``names``."""
        sides = (self.side, (self.side + 1) % len(self._arrays))
        if self._device != "cpu":
            return self._values[sides[0]], self._values[sides[1]]
        past, present = (
            {name: ort_value(array[start:stop]) for name, array in self._arrays[side].items()}
            for side in sides
        )
        return past, present

    def turn(self) -> None:
        """What went out comes in next."""
        self.side = (self.side + 1) % len(self._arrays)

"""A session's caches, and views of their rows as ONNX Runtime's values.

On a CPU a row is a view of one array, and goes in and out in the same memory. TensorRT does not let
an output lie where an input does: there the caches are there twice, and a call writes one side from
the other.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.weights.checkpoint import Array
from linnet_onnx.runtime import ort_value

TYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
}
Values = dict[str, ort.OrtValue]


class Caches:
    """Zeros of these shapes, by the name that each has where it comes in.

    ``turns`` is whether there are two sides. Raises UnavailableError for more rows than a device
    has views of: on one that is not the CPU, a value is whole.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[str, Sequence[int]]], device: str, *, turns: bool = False
    ) -> None:
        self._device, self.side, self._sides = device, 0, 2 if turns else 1
        self._kinds = {name: TYPES[kind] for name, (kind, _) in shapes.items()}
        rows = max((shape[0] for _, shape in shapes.values()), default=0)
        if device != "cpu" and rows > 1:
            raise UnavailableError(
                f"rows is {rows}; on {device} the onnx backend has caches of 1 row"
            )
        self._arrays: list[dict[str, Array]] = []
        self._values: list[Values] = []
        for _ in range(self._sides):
            arrays = {
                name: np.zeros(shape, self._kinds[name].numpy())
                for name, (_, shape) in shapes.items()
            }
            if device == "cpu":
                self._arrays.append(arrays)
            else:
                self._values.append(
                    {n: ort_value(array, self._kinds[n], device) for n, array in arrays.items()}
                )

    @property
    def names(self) -> list[str]:
        """What the caches are called where they come in."""
        return list(self._kinds)

    def rows(self, start: int, stop: int) -> tuple[Values, Values]:
        """What comes in and what goes out for these rows, by the names of ``names``."""
        sides = (self.side, (self.side + 1) % self._sides)
        if self._device != "cpu":
            return self._values[sides[0]], self._values[sides[1]]
        past, present = (
            {n: ort_value(a[start:stop], self._kinds[n]) for n, a in self._arrays[side].items()}
            for side in sides
        )
        return past, present

    def turn(self) -> None:
        """What went out comes in next."""
        self.side = (self.side + 1) % self._sides

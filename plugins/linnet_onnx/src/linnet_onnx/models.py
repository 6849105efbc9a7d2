"""The graphs of one model for ONNX Runtime: which there are, and how each is written."""

from linnet.spec.passes.expand import expand, expand_function
from linnet.spec.passes.inline import inline_entry
from linnet.spec.program import Function
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet_onnx import ops
from linnet_onnx.blocks import BITS, product
from linnet_onnx.fused import Step, linear, write_step
from linnet_onnx.graph import Graph
from linnet_onnx.step import head_path, sample_function, step_function, step_program
from linnet_onnx.weights import Weights
from linnet_onnx.writer import Special, Writer


class Graphs:
    """``dtype`` is f32, f16 or bf16, or int8 or int4: weights in blocks, and f32 for the rest.

    ``numerics`` ``exact`` writes every composite out in primitives.
    """

    def __init__(self, model: BoundModel, dtype: str, numerics: str, context: int) -> None:
        self._model, self._context = model, context
        self._exact = numerics == "exact"
        self._dtype = DType.F32 if dtype in BITS else DType(dtype)
        self._program = step_program(model.program)
        self._weights = Weights(self._program, model.parameters, self._dtype)
        self._product: Special = linear
        if dtype in BITS:
            head = head_path(step_function(self._program))
            self._product = product(dtype, head and self._weights.resolve(head).path)

    def step(self) -> Step:
        """Prompt and step in one."""
        if self._exact:
            return self.plain_step()
        return write_step(
            self._program, self._weights, self._dtype, self._product, context=self._context
        )

    def plain_step(self) -> Step:
        """The same in ONNX's own operators alone."""
        claimed = () if self._exact else ops.CLAIMED
        function = expand_function(step_function(self._program), claimed)
        return Step(Writer(self._program, self._weights, self._dtype).write(function, ()), ())

    def forward(self) -> Graph:
        """Logits of every position, without a cache, on the step's weights."""
        claimed = () if self._exact else ops.CLAIMED
        program = expand(step_program(self._model.program, "forward"), claimed)
        return self._write(inline_entry(program, "forward"))

    def sample(self) -> Graph:
        """A token of logits."""
        claimed = () if self._exact else ops.CLAIMED
        return self._write(expand_function(sample_function(self._model.program), claimed))

    def _write(self, function: Function) -> Graph:
        special = {} if self._exact else {"linear": self._product}
        return Writer(self._program, self._weights, self._dtype, special).write(function, ())

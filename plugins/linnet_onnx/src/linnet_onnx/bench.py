"""Benchmark methods: the onnx backend in each of its modes."""

from math import prod

from linnet.bench.sessions import SessionMethod
from linnet.plugins.benchmark import Job
from linnet.weights.binding import BoundModel
from linnet_onnx.blocks import BITS
from linnet_onnx.models import Graphs


class OnnxRuntime(SessionMethod):
    """One graph for prompt and step, its caches bound in place."""

    backend = "onnx"
    mode = "ort"

    def weight_bytes(self, model: BoundModel, job: Job) -> int:
        """Of weights in blocks: codes, scales and zeros, what stays f32, and f32 caches."""
        if job.dtype not in BITS:
            return super().weight_bytes(model, job)
        workload = job.workload
        graph = Graphs(model, job.dtype, "fast", workload.context).step().graph
        looked_up = {
            node.inputs[0].name
            for node in graph.nodes
            if node.op_type == "Gather" and node.inputs[0] is not None
        }
        weights = sum(stored.nbytes for stored in graph.stored if stored.name not in looked_up)
        numbers = sum(
            prod(size for size in state.type.shape[2:] if isinstance(size, int))
            for state in model.program.states
        )
        return weights + 4 * numbers * workload.middle


class TensorRT(SessionMethod):
    """The same graph in ONNX's own operators, built by TensorRT."""

    backend = "onnx"
    mode = "tensorrt"

"""Finding what f16 cannot hold: the largest value that each float of a graph takes on a prompt.

The graph that is run is the f32 one, with a maximum beside every value that would be f16.
"""

import numpy as np
import onnx_ir as ir

from linnet.errors import UnavailableError
from linnet.runtime.threads import thread_budget
from linnet.runtime.tokenizer import Tokenizer
from linnet.spec.types import DType
from linnet.verification.verify import probe_tokens
from linnet.weights.binding import BoundModel
from linnet_onnx.graph import dims
from linnet_onnx.runtime import start_session
from linnet_onnx.weights import Weights
from linnet_onnx.writer import write_entry

LARGEST = float(np.finfo(np.float16).max)
SHOWN = 4


def peaks(model: BoundModel) -> dict[str, float]:
    """The largest magnitude of every float of ``forward`` on the probe prompt, by its name."""
    weights = Weights(model.program, model.parameters, DType.F32)
    graph = write_entry(model.program, "forward", weights, DType.F32)
    graph.outputs.clear()
    kind = ir.DataType.FLOAT
    for name, value in graph.floats.items():
        size = graph.op("Abs", [value], kind, dims(value))
        graph.output(f"peak.{name}", graph.op("ReduceMax", [size], kind, (), keepdims=0))
    session = start_session(graph, name="peaks", threads=thread_budget(None))
    text = model.checkpoint.text
    tokenizer = Tokenizer(text, model.checkpoint.config) if text.tokenizer is not None else None
    values = session.run(None, {"tokens": probe_tokens(model, tokenizer)})
    return {name: float(value) for name, value in zip(graph.floats, values, strict=True)}


def refuse_overflow(model: BoundModel) -> None:
    """Raise UnavailableError naming the tensors that would be infinite in f16."""
    over = {name: peak for name, peak in peaks(model).items() if not peak <= LARGEST}
    if over:
        shown = ", ".join(f"{name} reaches {peak:.4g}" for name, peak in list(over.items())[:SHOWN])
        more = f" and {len(over) - SHOWN} more" if len(over) > SHOWN else ""
        raise UnavailableError(
            f"f16 cannot hold what the model computes on a probe prompt (its largest number is "
            f"{LARGEST:g}): {shown}{more}; export bf16 or f32"
        )

"""Making ONNX Runtime sessions: one place for threads, providers and weights.

Weights are handed over where they lie: a session reads this process's arrays and copies none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.weights.checkpoint import Array
from linnet_onnx.graph import Graph, Stored
from linnet_onnx.support import PROVIDERS

LINE = 64


def read_block(stored: Sequence[Stored]) -> dict[str, Array]:
    """Every tensor's values, side by side in one block, each on a cache line of its own.

    One block is large enough for NumPy to ask for huge pages, which are read faster.
    """
    starts, end = [], 0
    for tensor in stored:
        starts.append(end)
        end += -(-tensor.nbytes // LINE) * LINE
    block = np.empty(end + LINE, np.uint8)
    first = -block.ctypes.data % LINE
    arrays = {}
    for tensor, start in zip(stored, starts, strict=True):
        place = block[first + start : first + start + tensor.nbytes]
        array = place.view(tensor.kind.numpy()).reshape(tensor.shape)
        array[...] = tensor.read()
        arrays[tensor.name] = array
    return arrays


def start_session(
    graph: Graph, arrays: Mapping[str, Array], *, name: str, device: str, threads: int
) -> ort.InferenceSession:
    """A session of a graph on the given arrays; its provider is the one asked for, or an error."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not any(node.op_type == "MatMulNBits" for node in graph.nodes):
        # Products of floats read weights where they lie; packed ones would be a second copy, and
        # no faster. Products of blocks are fast only when they are packed.
        options.add_session_config_entry("session.disable_prepacking", "1")
    values = [ort_value(arrays[tensor.name], tensor.kind) for tensor in graph.stored]
    options.add_external_initializers([tensor.name for tensor in graph.stored], values)
    proto = ir.to_proto(graph.model(name)).SerializeToString()
    provider = PROVIDERS[device.partition(":")[0]]
    session = ort.InferenceSession(proto, options, providers=[provider_options(device)])
    granted = session.get_providers()
    if granted[0] != provider:
        raise UnavailableError(f"asked for {provider}, ONNX Runtime gave {', '.join(granted)}")
    return session


def provider_options(device: str) -> tuple[str, dict[str, Any]]:
    """A provider by its device, as sessions take it."""
    kind, _, number = device.partition(":")
    return PROVIDERS[kind], {"device_id": int(number or 0)} if kind == "cuda" else {}


def ort_value(array: Array, kind: ir.DataType | None = None) -> ort.OrtValue:
    """An array as ONNX Runtime's value, in the same memory."""
    if kind is ir.DataType.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), int(kind))
    return ort.OrtValue.ortvalue_from_numpy(array)

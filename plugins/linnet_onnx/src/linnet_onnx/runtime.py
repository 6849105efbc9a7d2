"""Making ONNX Runtime sessions: one place for threads, providers and weights.

Weights are handed over where they lie: a session reads this process's arrays and copies none.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.weights.checkpoint import Array
from linnet_onnx.graph import WEIGHTS, Graph, Stored
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


Provider = tuple[str, dict[str, Any]]
"""A provider's name and options."""


def start_session(
    graph: Graph,
    arrays: Mapping[str, Array],
    *,
    name: str,
    threads: int,
    provider: Provider = (PROVIDERS["cpu"], {}),
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
    values = {s.name: ort_value(arrays[s.name], s.kind) for s in graph.stored}
    proto = ir.to_proto(graph.model(name)).SerializeToString()
    if provider[0] == PROVIDERS["cpu"] and not graph.folds:
        session = _sharing(proto, options, values, provider)
    else:  # what it is handed it copies, to where it needs it
        options.add_external_initializers(list(values), list(values.values()))
        session = ort.InferenceSession(proto, options, providers=[provider])
    granted = session.get_providers()
    if granted[0] != provider[0]:
        raise UnavailableError(f"asked for {provider[0]}, ONNX Runtime gave {', '.join(granted)}")
    session.weights = values  # which it reads for as long as it lives, and does not own
    return session


def _sharing(
    proto: bytes,
    options: ort.SessionOptions,
    values: Mapping[str, ort.OrtValue],
    provider: Provider,
) -> ort.InferenceSession:
    """A session that reads values where they lie.

    ONNX Runtime copies what stands in for external data, and shares only what stands in for
    initializers that it could read: there is a file for these, long enough and empty. So no value
    may be needed before the session is made.
    """
    with tempfile.TemporaryDirectory(prefix="linnet-onnx-") as folder:
        with (Path(folder) / WEIGHTS).open("wb") as file:
            file.truncate(max((v.numpy().nbytes for v in values.values()), default=0))
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", folder
        )
        for name, value in values.items():
            options.add_initializer(name, value)
        return ort.InferenceSession(proto, options, providers=[provider])


def provider_of(device: str) -> Provider:
    """The provider of a device."""
    kind, _, number = device.partition(":")
    return PROVIDERS[kind], {"device_id": int(number or 0)} if kind == "cuda" else {}


def ort_value(array: Array, kind: ir.DataType | None = None, device: str = "cpu") -> ort.OrtValue:
    """An array as ONNX Runtime's value: on the CPU in the same memory, elsewhere a copy."""
    if kind is ir.DataType.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), int(kind))
    name, _, number = device.partition(":")
    return ort.OrtValue.ortvalue_from_numpy(array, name, int(number or 0))

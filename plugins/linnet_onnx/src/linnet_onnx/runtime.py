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
    there = ort.get_available_providers()
    if provider[0] not in there:
        raise UnavailableError(f"asked for {provider[0]}; ONNX Runtime has {', '.join(there)}")
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
    if provider[0] == PROVIDERS["cpu"]:
        session = _on_cpu(graph, proto, options, values, provider)
    else:
        session = _on_device(proto, options, values, provider)
    granted = session.get_providers()
    if granted[0] != provider[0]:
        raise UnavailableError(f"asked for {provider[0]}, ONNX Runtime gave {', '.join(granted)}")
    session.weights = values  # which it reads for as long as it lives, and does not own
    return session


def _on_cpu(
    graph: Graph,
    proto: bytes,
    options: ort.SessionOptions,
    values: Mapping[str, ort.OrtValue],
    provider: Provider,
) -> ort.InferenceSession:
    if not graph.folds:
        return _sharing(proto, options, values, provider)
    options.add_external_initializers(list(values), list(values.values()))  # it copies these
    return ort.InferenceSession(proto, options, providers=[provider])


def _on_device(
    proto: bytes,
    options: ort.SessionOptions,
    values: Mapping[str, ort.OrtValue],
    provider: Provider,
) -> ort.InferenceSession:
    """A session all of whose nodes the provider runs: none goes to the CPU instead.

    Raises UnavailableError where one would, with ONNX Runtime's reason.
    """
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_external_initializers(list(values), list(values.values()))
    try:
        return ort.InferenceSession(proto, options, providers=[provider], enable_fallback=0)
    except Exception as error:  # its errors have no common type, and say which this is
        raise UnavailableError(
            f"{provider[0]} does not run the whole graph, and what it leaves to the CPU is not "
            f"asked for: {error}; use device='cpu'"
        ) from error


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
    """An array as ONNX Runtime's value: on the CPU in the same memory, elsewhere a copy.

    ``kind`` is needed for bf16, which NumPy has not.
    """
    if device != "cpu":
        return copied(array, kind or ir.DataType.from_numpy(array.dtype), device)
    if kind is ir.DataType.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), int(kind))
    return ort.OrtValue.ortvalue_from_numpy(array)


def copied(array: Array, kind: ir.DataType, device: str) -> ort.OrtValue:
    """A copy of an array in the device's own memory, of this type."""
    name, _, number = device.partition(":")
    value = ort.OrtValue.ortvalue_from_shape_and_type(
        array.shape, int(kind), name, int(number or 0)
    )
    value.update_inplace(array.view(np.uint16) if kind is ir.DataType.BFLOAT16 else array)
    return value

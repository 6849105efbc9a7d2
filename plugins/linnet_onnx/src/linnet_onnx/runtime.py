"""Making ONNX Runtime sessions: one place for threads, providers and weights.

Weights go into a file that a session maps. What it multiplies with it packs, one matrix after the
other, and lets go of; so they are in memory once. The file has no name any more when it is made.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import raw_bytes
from linnet_onnx.graph import WEIGHTS, Graph, Stored
from linnet_onnx.support import PROVIDERS

Provider = tuple[str, dict[str, Any]]
"""A provider's name and options."""
PAGE = 4096
"""Where a tensor may begin: a map begins at a page."""


def start_session(
    graph: Graph, *, name: str, threads: int, provider: Provider = (PROVIDERS["cpu"], {})
) -> ort.InferenceSession:
    """A session of a graph on its weights; its provider is the one asked for, or an error.

    Raises UnavailableError, too, where there is no place for the weights' file.
    """
    there = ort.get_available_providers()
    if provider[0] not in there:
        raise UnavailableError(f"asked for {provider[0]}; ONNX Runtime has {', '.join(there)}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Where a file that is mapped cannot be removed, the system does it later.
    with tempfile.TemporaryDirectory(
        prefix="linnet-onnx-", ignore_cleanup_errors=os.name == "nt"
    ) as folder:
        starts = _write(graph.stored, Path(folder) / WEIGHTS)
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", folder
        )
        proto = ir.to_proto(_placed(graph, name, starts)).SerializeToString()
        if provider[0] == PROVIDERS["cpu"]:
            session = ort.InferenceSession(proto, options, providers=[provider])
        else:
            session = _on_device(proto, options, provider)
    granted = session.get_providers()
    if granted[0] != provider[0]:
        raise UnavailableError(f"asked for {provider[0]}, ONNX Runtime gave {', '.join(granted)}")
    return session


def _write(stored: Sequence[Stored], path: Path) -> list[int]:
    """Write the tensors' values one after the other; where each begins."""
    starts, end = [], 0
    try:
        with path.open("wb") as file:
            for tensor in stored:
                starts.append(end)
                file.seek(end)
                values = raw_bytes(tensor.read())
                assert values.nbytes == tensor.nbytes, tensor.name
                file.write(values.data)
                end += -(-tensor.nbytes // PAGE) * PAGE
    except OSError as error:
        needed = sum(tensor.nbytes for tensor in stored)
        raise UnavailableError(
            f"ONNX Runtime reads weights from a file, and {path.parent} does not take one of "
            f"{needed:,} bytes: {error}; set TMPDIR to a folder with more room"
        ) from error
    return starts


def _placed(graph: Graph, name: str, starts: Sequence[int]) -> ir.Model:
    model = graph.model(name)
    for tensor, start in zip(graph.stored, starts, strict=True):
        model.graph.initializers[tensor.name].const_value = tensor.lying(WEIGHTS, start)
    return model


def _on_device(proto: bytes, options: ort.SessionOptions, provider: Provider) -> Any:
    """A session all of whose nodes the provider runs: none goes to the CPU instead.

    Raises UnavailableError where one would, with ONNX Runtime's reason.
    """
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        return ort.InferenceSession(proto, options, providers=[provider], enable_fallback=0)
    except Exception as error:  # its errors have no common type, and say which this is
        raise UnavailableError(
            f"{provider[0]} does not run the whole graph, and what it leaves to the CPU is not "
            f"asked for: {error}; use device='cpu'"
        ) from error


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

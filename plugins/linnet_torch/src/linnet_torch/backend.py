"""The PyTorch backend: what it can grant here, and loading a model into a session."""

from collections import Counter
from typing import Any

import numpy as np
import torch

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import LoadOptions, Probe
from linnet.spec.passes.join import join_linears
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet_torch.session import TorchSession
from linnet_torch.source import generate
from linnet_torch.weights import DTYPES

MODES = ("eager", "inductor", "cudagraphs")
DEVICES = ("cpu", "cuda")


class TorchBackend:
    """Writes a program as PyTorch source, and runs that."""

    def probe(self) -> Probe:
        """PyTorch is imported with this module; what is left to find are devices."""
        devices = "cpu"
        if torch.cuda.is_available():
            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            devices += f", cuda ({', '.join(names)})"
        return Probe(True, f"PyTorch {torch.__version__}; {devices}")

    def source(self, model: BoundModel, options: LoadOptions) -> str:
        """The source it would run for these options; reads no weights."""
        return generate(join_linears(model.program), options.numerics).text

    def load(self, model: BoundModel, options: LoadOptions) -> TorchSession:
        """Read the weights and make the caches.

        The device that is not asked for is the CPU. The dtype that is not asked for is f32 on the
        CPU; on CUDA, the checkpoint's own if that is f32, bf16 or f16, else f32. Raises
        UnavailableError for what cannot be granted.
        """
        mode = find_mode(options)
        device = find_device(options.device)
        if mode == "cudagraphs" and device.type != "cuda":
            raise UnavailableError(
                f"mode 'cudagraphs' runs on CUDA, not on {device}: ask for device='cuda', or for "
                "mode='inductor'"
            )
        notes: tuple[str, ...] = ()
        if options.dtype is None:
            dtype, note = default_dtype(model, device)
            notes = (note,)
        else:
            dtype = find_dtype(options.dtype, device)
        max_seq = options.max_seq or model.max_positions
        if max_seq is None:
            raise UnavailableError("this model states no longest sequence: give max_seq")
        torch.set_num_threads(options.threads)
        granted: dict[str, Any] = {
            "mode": mode,
            "dtype": dtype,
            "device": device,
            "rows": options.rows,
            "max_seq": max_seq,
            "threads": options.threads,
            "numerics": options.numerics,
            "notes": notes,
        }
        if mode == "eager":
            program = join_linears(model.program)
            return TorchSession(model, program, generate(program, options.numerics), **granted)
        from linnet_torch.compiled_session import CompiledSession

        return CompiledSession(model, **granted)


def find_mode(options: LoadOptions) -> str:
    """The mode, ``eager`` where none is asked for."""
    mode = options.mode or "eager"
    if mode not in MODES:
        raise UnavailableError(f"the torch backend has modes {', '.join(MODES)}, not {mode!r}")
    if mode != "eager" and options.numerics != "fast":
        raise UnavailableError(
            f"mode {mode!r} runs with fast numerics, not {options.numerics!r}: use mode='eager'"
        )
    return mode


def find_device(name: str | None) -> torch.device:
    """The device by its name (``cpu``, ``cuda``, ``cuda:1``), if it is there."""
    kind, _, number = ("cpu" if name is None else str(name)).partition(":")
    if kind not in DEVICES or (number and (kind == "cpu" or not number.isdecimal())):
        raise UnavailableError(f"the torch backend runs on {' or '.join(DEVICES)}, not on {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnavailableError(
            f"device {name!r} is not available: {_why_no_cuda()}; use device='cpu', or install a "
            "PyTorch for your driver (https://pytorch.org/get-started/locally)"
        )
    count = torch.cuda.device_count()
    index = int(number) if number else torch.cuda.current_device()
    if index >= count:
        raise UnavailableError(f"device {name!r} is not available: there are {count} CUDA devices")
    return torch.device("cuda", index)


def _why_no_cuda() -> str:
    """PyTorch's own words."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "PyTorch sees no CUDA device"


def find_dtype(name: str, device: torch.device) -> DType:
    """A dtype by its name, if the device computes in it."""
    names = {str(dtype): dtype for dtype in DTYPES}
    if name not in names:
        raise UnavailableError(f"the torch backend computes in {', '.join(names)}, not in {name!r}")
    dtype = names[name]
    if dtype is DType.BF16 and not _has_bf16(device):
        raise UnavailableError(
            f"{torch.cuda.get_device_name(device)} does not compute in bf16; ask for f16 or f32"
        )
    return dtype


def _has_bf16(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


def default_dtype(model: BoundModel, device: torch.device) -> tuple[DType, str]:
    """What to compute in when nobody says, and why."""
    if device.type == "cpu":
        return DType.F32, "dtype f32: the default on the CPU"
    sizes: Counter[DType] = Counter()
    for parameter in model.parameters.values():
        sizes[parameter.dtype] += int(np.prod(parameter.shape, dtype=np.int64))
    stored = sizes.most_common(1)[0][0] if sizes else DType.F32
    if stored in DTYPES and (stored is not DType.BF16 or _has_bf16(device)):
        return stored, f"dtype {stored}: what the checkpoint stores"
    return DType.F32, f"dtype f32: {device} does not compute in {stored}, which is stored"

"""The ONNX backend: what it can grant here, and loading a model into a session."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import onnx_ir as ir
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Granted, LoadOptions, Probe
from linnet.weights.binding import BoundModel
from linnet_onnx import tensorrt
from linnet_onnx.blocks import BITS
from linnet_onnx.graph import Graph
from linnet_onnx.runtime import Provider, provider_of
from linnet_onnx.session import OrtSession
from linnet_onnx.support import DTYPES, PROVIDERS

MODES = ("ort", "tensorrt")


class OnnxBackend:
    """Writes a program as ONNX graphs, and runs them in ONNX Runtime."""

    def probe(self) -> Probe:
        """ONNX Runtime is imported with this module; its providers are those it was built with."""
        there = ort.get_available_providers()
        kinds = [kind for kind, provider in PROVIDERS.items() if provider in there]
        return Probe(True, f"ONNX Runtime {ort.__version__}; {', '.join(kinds)}")

    def load(self, model: BoundModel, options: LoadOptions) -> OrtSession:
        """Write the step, read the weights, make the caches.

        What is not asked for is the CPU and f32. Raises UnavailableError for what cannot be
        granted, before ONNX Runtime is asked where it is known.
        """
        refuse_disagreement(options)
        mode = find_mode(options)
        device = find_device(options.device or ("cpu" if mode == "ort" else "cuda"))
        dtype = find_dtype(options.dtype or "f32", device)
        if options.numerics not in ("fast", "exact"):
            raise UnavailableError(f"numerics are fast or exact, not {options.numerics!r}")
        if options.numerics == "exact" and dtype in BITS:
            raise UnavailableError(
                f"weights in {dtype} are not exact: ask for f32, or for fast numerics"
            )
        max_seq = options.max_seq or model.max_positions
        if max_seq is None:
            raise UnavailableError("this model states no longest sequence: give max_seq")
        granted = Granted(
            backend="onnx",
            mode=mode,
            dtype=dtype,
            device=device,
            rows=options.rows,
            max_seq=max_seq,
            threads=options.threads,
            numerics=options.numerics,
        )
        if mode == "tensorrt":
            return _load_tensorrt(model, granted)
        return OrtSession(model, granted, lambda *_: provider_of(device))


def _load_tensorrt(model: BoundModel, granted: Granted) -> OrtSession:
    number = int(granted.device.partition(":")[2] or 0)

    def provide(graph: Graph, caches: Mapping[str, Sequence[int]]) -> Provider:
        shapes = tensorrt.profiles(caches, granted.max_seq)
        facts = [*shapes.values(), *tensorrt.versions(number)]
        proto: bytes = ir.to_proto(graph.model("step")).SerializeToString()
        weights = {stored.name: stored.read for stored in graph.stored}
        key = tensorrt.engine_key(proto, weights, facts)
        return tensorrt.PROVIDER, tensorrt.provider_options(key, shapes, number)

    session = OrtSession(model, granted, provide, fused=False, turns=True)
    if granted.dtype == "f16":
        plain = replace(granted, mode="ort", device="cpu", dtype="f32")
        reference = OrtSession(model, plain, lambda *_: provider_of("cpu"))
        with closing(reference):
            said = tensorrt.hold(session, reference, model.vocab)
        session.granted = replace(session.granted, notes=(*session.granted.notes, said))
    return session


def refuse_disagreement(options: LoadOptions) -> None:
    """Raise UnavailableError for a device or dtype that the mode has nowhere."""
    if options.mode != "tensorrt":
        return
    kind = (options.device or "cuda").partition(":")[0]
    if kind != "cuda":
        raise UnavailableError(
            f"mode 'tensorrt' and device {options.device!r} disagree: TensorRT runs on cuda; leave "
            "the device out, or use mode='ort'"
        )
    if options.dtype in BITS:
        raise UnavailableError(
            f"mode 'tensorrt' and dtype {options.dtype!r} disagree: weights in blocks are read by "
            f"an operator of ONNX Runtime's CPU provider; ask for {', '.join(DTYPES['cuda'])}, or "
            "use mode='ort' with device='cpu'"
        )


def find_mode(options: LoadOptions) -> str:
    """The mode, ``ort`` where none is asked for."""
    mode = options.mode or MODES[0]
    if mode not in MODES:
        raise UnavailableError(f"the onnx backend has modes {', '.join(MODES)}, not {mode!r}")
    reason = tensorrt.refusal() if mode == "tensorrt" else None
    if reason is not None:
        raise UnavailableError(f"mode 'tensorrt' is not available: {reason}; or use mode='ort'")
    return mode


def find_device(name: str) -> str:
    """The device by its name (``cpu``, ``cuda``, ``cuda:1``), if ONNX Runtime was built for it."""
    kind, _, number = name.partition(":")
    if kind not in PROVIDERS or (number and (kind == "cpu" or not number.isdecimal())):
        raise UnavailableError(f"the onnx backend runs on {' or '.join(PROVIDERS)}, not {name!r}")
    there = ort.get_available_providers()
    if PROVIDERS[kind] not in there:
        raise UnavailableError(
            f"device {name!r} is not available: this ONNX Runtime ({ort.__version__}) has "
            f"{', '.join(there)}, not {PROVIDERS[kind]}; use device='cpu', or in an environment "
            'without onnxruntime: pip install "linnet[onnx-gpu]"'
        )
    return name


def find_dtype(name: str, device: str) -> str:
    """The dtype, if the device's provider multiplies in it."""
    known = DTYPES[device.partition(":")[0]]
    if name not in known:
        why = ""
        if name in DTYPES["cuda"]:
            why = (
                ": ONNX Runtime has no products in it there, and would cast every weight to f32 "
                "at every step"
            )
        raise UnavailableError(
            f"the onnx backend computes in {', '.join(known)} on {device}, not in {name!r}{why}"
        )
    return name

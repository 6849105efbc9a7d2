"""Mode ``tensorrt``: the step in ONNX's own operators, run by ONNX Runtime's TensorRT provider.

An engine is kept in the cache folder under a key of all that decides it. In f16 it is compared with
f32 on the CPU before anyone reads its output.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnxruntime as ort

from linnet.distance import compare
from linnet.errors import UnavailableError
from linnet.nest.sources import cache_root
from linnet.plugins.interfaces import Session
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import raw_bytes

PROVIDER = "TensorrtExecutionProvider"
ALLOW = "LINNET_TENSORRT_FAR"
PROBE = 64
LEAST_TOP1, MOST_KL = 0.95, 1e-2
"""What f16 must hold against f32 on random tokens."""


def refusal() -> str | None:
    """Why there is no TensorRT here; None where there is."""
    if find_spec("tensorrt") is None:
        return (
            "there is no module tensorrt; on a machine with an NVIDIA GPU, without onnxruntime: "
            'pip install "linnet[trt]"'
        )
    there = ort.get_available_providers()
    if PROVIDER not in there:
        return (
            f"this ONNX Runtime ({ort.__version__}) has {', '.join(there)}, not {PROVIDER}; in an "
            'environment without onnxruntime: pip install "linnet[trt]"'
        )
    return None


def engine_key(
    graph: bytes, weights: Mapping[str, Callable[[], Array]], facts: Sequence[str]
) -> str:
    """A name for what an engine is built of: the graph, every weight, profiles and versions.

    ``weights`` are read one after the other.
    """
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    add(graph)
    for name in sorted(weights):
        array = weights[name]()
        add(f"{name} {array.dtype} {array.shape}".encode())
        add(raw_bytes(array).data)
    for fact in facts:
        add(fact.encode())
    return digest.hexdigest()[:32]


def profiles(caches: Mapping[str, Sequence[int]], max_seq: int) -> dict[str, str]:
    """The shapes that an engine is built for: prompts of 1 to ``max_seq`` tokens, one row."""
    fixed = [f"{name}:{'x'.join(map(str, shape))}" for name, shape in caches.items()]
    return {
        f"trt_profile_{which}_shapes": ",".join(
            [f"tokens:1x{length}", "starts:1", "lengths:1", *fixed]
        )
        for which, length in (("min", 1), ("opt", 1), ("max", max_seq))
    }


def provider_options(key: str, shapes: Mapping[str, str], number: int) -> dict[str, Any]:
    """The provider's options: the engine's folder, and its profiles."""
    folder = cache_root() / "tensorrt" / key
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "device_id": number,
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": str(folder),
        **shapes,
    }


def versions(number: int) -> list[str]:
    """TensorRT's version, the drivers and names of the GPUs, and which of them is meant.

    Raises UnavailableError where ``nvidia-smi`` does not say: an engine of another GPU would be
    taken for this one's.
    """
    import subprocess
    from importlib.metadata import version

    asked = ["nvidia-smi", "--query-gpu=uuid,name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        raise UnavailableError(
            f"the GPU's name is part of an engine's key, and {' '.join(asked)} failed: "
            f"{str(said).strip()}; put nvidia-smi of the driver on the PATH"
        ) from error
    # Its order need not be CUDA's, so all are named beside what chooses among them.
    chosen = f"{number} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"
    gpus = sorted(line.strip() for line in done.stdout.splitlines())
    return [f"tensorrt {version('tensorrt')}", f"onnxruntime {ort.__version__}", *gpus, chosen]


def hold(tested: Session, reference: Session, vocab: int) -> str:
    """How far a session's logits are from another's on random tokens, in a sentence.

    Raises UnavailableError beyond the bound, unless ``LINNET_TENSORRT_FAR=1`` allows it.
    """
    size = min(PROBE, tested.granted.max_seq)
    tokens = np.random.default_rng(0).integers(0, vocab, size, dtype=np.int32)
    logits = []
    for session in (reference, tested):
        rows = [
            session.run(
                "extend",
                {
                    "tokens": tokens[None, at : at + 1],
                    "rows": np.zeros(1, np.int32),
                    "starts": np.array([at], np.int32),
                    "lengths": np.ones(1, np.int32),
                },
            )
            for at in range(size)
        ]
        logits.append(np.stack(rows, 1))
    distance = compare(logits[0], logits[1])
    said = (
        f"on {size} random tokens {tested.granted.dtype} is off f32 by {distance.max_abs:.3g} "
        f"(KL {distance.kl:.3g}, top-1 agreement {distance.top1:.3f})"
    )
    near = distance.top1 >= LEAST_TOP1 and distance.kl <= MOST_KL
    if not near and os.environ.get(ALLOW) != "1":
        raise UnavailableError(
            f"{said}; the bound is KL {MOST_KL:g} and top-1 {LEAST_TOP1:g}: ask for f32 or bf16, "
            f"or set {ALLOW}=1 to run it all the same"
        )
    return said

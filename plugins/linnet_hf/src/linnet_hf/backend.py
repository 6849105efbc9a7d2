"""Transformers as a backend: its own model class and its own loading, filled from a checkpoint.

It computes nothing itself and does not look at the program: that is what makes it a reference.
Only the checkpoint's config and tensors, both in Transformers' own dialect, are handed over.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import logging as transformers_logging

from linnet.errors import BindingError, ConfigError, RequestError, UnavailableError
from linnet.plugins.interfaces import Granted, LoadOptions, Probe
from linnet.runtime.requests import check_inputs
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
DTYPES = {
    "f32": (DType.F32, torch.float32),
    "bf16": (DType.BF16, torch.bfloat16),
    "f16": (DType.F16, torch.float16),
}
NOT_READ: Mapping[str, tuple[str, ...]] = {"llama": ("sliding_window",)}
"""Config keys that Linnet's family honours and the Transformers class of that ``model_type`` does
not read: with one of them set it would be the reference of another model."""


class TransformersBackend:
    """Runs a checkpoint in the Transformers class of its ``model_type``, attention eager."""

    def probe(self) -> Probe:
        """Versions, and the CUDA devices there are."""
        cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Probe(True, ", ".join([*versions(), *(cuda or ["no CUDA device"])]))

    def load(self, model: BoundModel, options: LoadOptions) -> "TransformersSession":
        """Build the class without initialising it and give it the checkpoint's tensors.

        Tensors already in the dtype are not copied. Nothing is downloaded. The dtype is f32 and
        the device the CPU unless asked for otherwise. Raises UnavailableError for what cannot be
        granted, ConfigError for a config that Transformers refuses, BindingError for a tensor
        that it misses or does not know, CheckpointError for values that the dtype cannot hold.
        """
        name = options.dtype or "f32"
        if name not in DTYPES:
            raise UnavailableError(
                f"the transformers backend computes in {', '.join(DTYPES)}, not {name}"
            )
        if options.mode not in (None, "eager"):
            raise UnavailableError(f"the transformers backend has mode eager, not {options.mode}")
        if options.numerics != "fast":
            raise UnavailableError(
                f"the transformers backend runs Transformers' own modules: numerics is fast, "
                f"not {options.numerics}"
            )
        device = _device(options.device)
        max_seq = options.max_seq or model.max_positions
        if max_seq is None:
            raise UnavailableError("this model states no longest sequence: give max_seq")
        torch.set_num_threads(options.threads)
        loaded = load_model(model, name).to(device)
        granted = Granted(
            backend="transformers",
            mode=loaded.config._attn_implementation,
            dtype=next(key for key, (_, kind) in DTYPES.items() if kind == loaded.dtype),
            device=str(loaded.device),
            rows=options.rows,
            max_seq=max_seq,
            threads=torch.get_num_threads(),
            notes=(", ".join(versions()),),
        )
        return TransformersSession(loaded, model, granted)


class TransformersSession:
    """A Transformers model that runs ``forward``."""

    def __init__(self, loaded: Any, model: BoundModel, granted: Granted) -> None:
        self._loaded = loaded
        self._model = model
        self.granted = granted

    def run(self, entry: str, inputs: Mapping[str, Array]) -> Array:
        """Logits f32 ``[B, S, V]`` of i32 ``tokens[B, S]``."""
        if self._loaded is None:
            raise UnavailableError("this session is closed; load the model again")
        if entry != "forward":
            raise RequestError(f"the transformers backend runs the entry forward, not {entry}")
        granted = self.granted
        check_inputs(
            self._model.program, granted.rows, granted.max_seq, self._model.vocab, entry, inputs
        )
        torch.set_num_threads(
            granted.threads
        )  # the process has one number; another may have set it
        tokens = torch.from_numpy(np.ascontiguousarray(inputs["tokens"], np.int64))
        with torch.inference_mode():
            output = self._loaded(input_ids=tokens.to(granted.device), use_cache=False)
            logits: Array = output.logits.float().cpu().numpy()
        return logits

    def source(self) -> None:
        """It generates none."""

    def close(self) -> None:
        """Drop the model."""
        self._loaded = None


def versions() -> list[str]:
    """What computes: for notes."""
    return [f"transformers {transformers.__version__}", f"torch {torch.__version__}"]


def _device(asked: str | None) -> torch.device:
    try:
        device = torch.device("cpu" if asked is None else str(asked))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UnavailableError(f"the transformers backend runs on cpu or cuda, not on {asked}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"{asked} was asked for, and PyTorch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return device


def load_model(model: BoundModel, dtype: str, attention: str = "eager") -> Any:
    """The Transformers model, in evaluation mode, on the CPU."""
    checkpoint = model.checkpoint
    config = _config(model)
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes:
        raise UnavailableError(
            f"Transformers {transformers.__version__} has no causal language model for model_type "
            f"{config.model_type!r}"
        )
    model_class = classes[type(config)]
    kind, torch_dtype = DTYPES[dtype]
    state = {
        name: _tensor(cast(tensor.read(), kind, name))
        for name, tensor in checkpoint.tensors.items()
    }
    with _quiet():
        loaded, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            attn_implementation=attention,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below
            output_loading_info=True,
            **{"dtype" if VERSION >= (4, 56) else "torch_dtype": torch_dtype},
        )
    faults = {key: sorted(map(str, found)) for key, found in report.items() if found}
    if faults:
        told = "; ".join(f"{key.replace('_', ' ')}: {', '.join(n)}" for key, n in faults.items())
        raise BindingError(f"{checkpoint.location} does not fit {model_class.__name__}: {told}")
    return loaded


def _config(model: BoundModel) -> Any:
    """The checkpoint's config as Transformers reads it."""
    config = deepcopy(dict(model.checkpoint.config))  # its class fills in nested dicts
    model_type = str(config.get("model_type"))
    classes: Any = transformers.CONFIG_MAPPING
    if model_type not in classes:
        raise UnavailableError(
            f"Transformers {transformers.__version__} does not know model_type {model_type!r}"
        )
    for key in NOT_READ.get(model_type, ()):
        if config.get(key) is not None:
            raise UnavailableError(
                f"the config has {key} {config[key]!r}, which Transformers ignores for "
                f"model_type {model_type!r}: it cannot be the reference of this model"
            )
    # Where the config says nothing, binding has decided from the tensors.
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = any(p.tied_to for p in model.program.parameters)
    if VERSION < (5, 0):
        _state_rope_as_before_5(config)
    try:
        return classes[model_type].from_dict(config)
    except Exception as error:  # its validators raise types of their own
        raise ConfigError(
            f"Transformers {transformers.__version__} refuses this config: {error}"
        ) from error


def _state_rope_as_before_5(config: dict[str, Any]) -> None:
    """Move ``rope_parameters`` to the keys that older releases read; they would ignore it."""
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnavailableError(
            f"the config has rope_parameters by layer type, which Transformers "
            f'{transformers.__version__} does not read: pip install "transformers>=5"'
        )
    rope = dict(rope)
    if "rope_theta" in rope:
        config["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope


def _tensor(array: Array) -> torch.Tensor:
    """A tensor that shares the array's memory; bf16 by its bits, which NumPy does not know."""
    bf16 = array.dtype.name == "bfloat16"
    with warnings.catch_warnings():
        # Views of a memory map are read-only, and so are the weights: nothing here writes them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array.view(np.int16) if bf16 else array)
    return tensor.view(torch.bfloat16) if bf16 else tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a load that takes no time."""
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

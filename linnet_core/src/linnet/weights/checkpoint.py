"""What every checkpoint format is read into: a config, tensors, and the text side.

A checkpoint is always seen in the Transformers dialect: the keys of ``config.json``, the tensor
names and layouts of that family's safetensors files, ``tokenizer.json``. A format that encodes
things otherwise (GGUF permutes rows, renames keys, adds one to norms) undoes that as it reads, so
that families, backends and exporters know one dialect. Nothing is read until it is asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linnet.spec.types import DType

Array = NDArray[Any]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its type is known, its values are read by ``read()``.

    ``dtype`` is what ``read()`` returns (bf16 as ``ml_dtypes.bfloat16``); ``encoding`` says how
    the file stores it when that differs (``"q4_1"``). ``read()`` may return a read-only view of a
    memory map; callers copy before they write.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    read: Callable[[], Array] = field(repr=False, compare=False)
    encoding: str | None = None


@dataclass(frozen=True)
class TextFiles:
    """The text side of a checkpoint, each part as its Transformers file would hold it.

    ``None`` means that the checkpoint does not have the part, never that it was not looked for.
    """

    tokenizer: str | None = None
    """The content of ``tokenizer.json``."""
    tokenizer_config: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] | None = None
    chat_template: str | None = None
    """Jinja source, from its own file or from ``tokenizer_config``."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened; ``notes`` are things a user should be told about it."""

    location: Path
    format: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    text: TextFiles = TextFiles()
    notes: tuple[str, ...] = ()

    def nbytes(self) -> int:
        """Bytes of all tensors as ``read()`` returns them."""
        return sum(
            int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize
            for tensor in self.tensors.values()
        )


def class_name(model_type: str) -> str:
    """What Transformers calls the causal language model of a ``model_type``."""
    if model_type == "gpt2":
        return "GPT2LMHeadModel"
    words = model_type.removesuffix("_text").split("_")
    return "".join(word.capitalize() for word in words) + "ForCausalLM"

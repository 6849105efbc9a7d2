"""The GGUF format: a file, or a folder with one, as a checkpoint in the Transformers dialect."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Checkpoint
from linnet_gguf import gpt2, llama
from linnet_gguf.architectures import ARCHITECTURES
from linnet_gguf.container import TensorInfo, read_container
from linnet_gguf.metadata import Metadata
from linnet_gguf.tokenizer import read_text

_DTYPE_NAMES = {DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}


class GGUFFormat:
    """Opens GGUF files."""

    def open(self, path: Path) -> Checkpoint:
        """Open a ``.gguf`` file, or a folder that holds exactly one. Reads no weights.

        Raises CheckpointError for a file that is damaged, hostile, or not supported.
        """
        file = _file(path)
        container = read_container(file)
        meta = Metadata(container.metadata, str(file))
        _refuse_parts(meta)
        name = meta.required("general.architecture", str)
        if name == gpt2.ARCHITECTURE:
            config, notes = gpt2.read_config(meta, container)
            tensors = gpt2.read_tensors(meta, container)
        elif name in ARCHITECTURES:
            config, notes = llama.read_config(meta, container, ARCHITECTURES[name])
            tensors = llama.read_tensors(meta, container, config, ARCHITECTURES[name])
        else:
            raise meta.error(
                f"holds a model of the architecture {name!r}; known here: "
                f"{', '.join(sorted((*ARCHITECTURES, gpt2.ARCHITECTURE)))}"
            )
        dtype = _dtype(container.tensors.values())
        text, token_ids, text_notes = read_text(meta, config)
        config |= {**token_ids, "dtype": dtype, "torch_dtype": dtype}
        return Checkpoint(
            location=file,
            format="gguf",
            config=config,
            tensors=tensors,
            text=text,
            notes=(*_storage(container.tensors.values()), *notes, *text_notes),
        )


def _file(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if not files:
        raise CheckpointError(f"{path} holds no .gguf file")
    listed = ", ".join(file.name for file in files)
    raise CheckpointError(f"{path} holds {len(files)} GGUF files: name one of {listed}")


def _refuse_parts(meta: Metadata) -> None:
    parts = meta.optional("split.count", int)
    if parts is not None and parts > 1:
        raise meta.error(
            f"is one of {parts} parts of a model, which are not read yet: join them with "
            "`llama-gguf-split --merge FIRST_PART WHOLE.gguf`"
        )


def _dtype(tensors: Iterable[TensorInfo]) -> str:
    """The dtype that holds every matrix as it is read; vectors are f32 in every file."""
    dtypes = {info.encoding.dtype for info in tensors if len(info.shape) > 1}
    return _DTYPE_NAMES[dtypes.pop() if len(dtypes) == 1 else DType.F32]


def _storage(tensors: Iterable[TensorInfo]) -> tuple[str, ...]:
    counts = Counter(info.encoding.name for info in tensors if not info.encoding.is_plain)
    if not counts:
        return ()
    listed = ", ".join(f"{count} as {name}" for name, count in counts.most_common())
    return (f"the file stores tensors quantized ({listed}): they are decoded to f32",)

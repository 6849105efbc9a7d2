"""What crosses formats: HF to GGUF to HF and GGUF to HF to GGUF, to the bit, and twice."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linnet
from linnet.models.llama import Llama
from linnet.runtime.load import bind
from linnet.runtime.tokenizer import Tokenizer
from linnet.spec.serialize import fingerprint
from linnet.spec.types import DType
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.testing.text import f0_text
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import StoredTensor
from linnet.weights.dtypes import cast

VARIANTS: dict[str, dict[str, Any]] = {
    "f0": {},
    "head_dim 8": {"head_dim": 8},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "tied biases 8": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 8},
}
PROBE = ["Hello world 123's", "<|im_start|>user\nHello<think>  and\n\n<|im_end|>", "", " ", "1 2 3"]


def f0(dtype: DType, **overrides: Any) -> BoundModel:
    checkpoint = random_checkpoint(f0_config(**overrides), seed=5)
    tensors = {
        name: StoredTensor(name, t.shape, dtype, lambda t=t: cast(t.read(), dtype, t.name))
        for name, t in checkpoint.tensors.items()
    }
    return Llama().bind(replace(checkpoint, tensors=tensors, text=f0_text()))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_same_model(one: BoundModel, other: BoundModel) -> None:
    assert fingerprint(one.program) == fingerprint(other.program)
    assert one.parameters.keys() == other.parameters.keys()
    for path, parameter in one.parameters.items():
        ours, theirs = parameter.read(), other.parameters[path].read()
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, path
        assert ours.tobytes() == theirs.tobytes(), path
    ours_, theirs_ = (Tokenizer(m.checkpoint.text, m.checkpoint.config) for m in (one, other))
    for text in PROBE:
        assert ours_.encode(text) == theirs_.encode(text)
    assert set(ours_.end_ids) == set(theirs_.end_ids)
    messages = [{"role": "user", "content": "Hello"}]
    assert ours_.encode_chat(messages) == theirs_.encode_chat(messages)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
def test_from_hf_to_gguf_and_back(variant: str, dtype: DType, tmp_path: Path) -> None:
    linnet.hf.export(f0(dtype, **VARIANTS[variant]), tmp_path / "hf")
    source = bind(tmp_path / "hf")
    gguf = linnet.gguf.export(source, tmp_path / "gguf", name="x").files[0]
    linnet.hf.export(bind(gguf), tmp_path / "back")
    assert_same_model(source, bind(tmp_path / "back"))
    # Once more around, and no byte of either differs.
    linnet.gguf.export(bind(tmp_path / "back"), tmp_path / "gguf2", name="x")
    assert files(tmp_path / "gguf") == files(tmp_path / "gguf2")
    linnet.hf.export(bind(tmp_path / "gguf2"), tmp_path / "back2")
    assert files(tmp_path / "back") == files(tmp_path / "back2")


def test_tensors_of_a_padded_vocabulary_survive(tmp_path: Path) -> None:
    model = f0(DType.F32)
    linnet.gguf.export(model, tmp_path / "gguf")
    back = bind(tmp_path / "gguf")
    assert back.vocab == 136
    assert len(Tokenizer(back.checkpoint.text, back.checkpoint.config).vocabulary) == 131
    embedding = back.parameters["model.embed_tokens.weight"].read()
    assert np.array_equal(embedding, model.parameters["model.embed_tokens.weight"].read())


@pytest.mark.parametrize("source", ["hf", "gguf"])
@pytest.mark.parametrize("exporter", ["hf", "gguf"])
def test_an_export_imports_no_framework(exporter: str, source: str, tmp_path: Path) -> None:
    """Nor ``ml_dtypes``, which takes a second: f32, as blocks are decoded, is written as bf16."""
    exporting = {"hf": linnet.hf, "gguf": linnet.gguf}
    exporting[source].export(f0(DType.F32), tmp_path / "in")
    code = (
        "import sys; from pathlib import Path\n"
        "import linnet; from linnet.runtime.load import bind\n"
        f"linnet.{exporter}.export(bind(Path(sys.argv[1])), Path(sys.argv[2]), dtype='bf16')\n"
        "heavy = {'torch', 'transformers', 'jax', 'onnxruntime', 'ml_dtypes'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert bind(tmp_path / "out").parameters["model.embed_tokens.weight"].dtype is DType.BF16


def _around(source: BoundModel, folder: Path) -> None:
    """GGUF to HF to GGUF, twice: the same file to the byte each time."""
    first = linnet.gguf.export(source, folder / "gguf", name="x").folder
    for turn in ("one", "two"):
        linnet.hf.export(bind(first), folder / f"hf {turn}")
        again = linnet.gguf.export(bind(folder / f"hf {turn}"), folder / f"gguf {turn}", name="x")
        assert files(again.folder) == files(folder / "gguf")
        first = again.folder
    assert files(folder / "hf one") == files(folder / "hf two")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
def test_from_gguf_to_hf_and_back(variant: str, dtype: DType, tmp_path: Path) -> None:
    _around(f0(dtype, **VARIANTS[variant]), tmp_path)


def test_the_real_model_survives(smollm2_path: Path, tmp_path: Path) -> None:
    """Its blocks are decoded to f32, which both formats hold to the bit."""
    source = bind(smollm2_path)
    linnet.hf.export(source, tmp_path / "hf")
    linnet.gguf.export(bind(tmp_path / "hf"), tmp_path / "gguf")
    assert_same_model(source, bind(tmp_path / "gguf"))

"""Every family as ONNX: ONNX Runtime gives its logits, and Linnet reads the folder back."""

from pathlib import Path

import numpy as np
import pytest
from onnxruntime import InferenceSession
from safetensors.numpy import load_file, save_file

import linnet
from linnet.errors import CheckpointError
from linnet.plugins.interfaces import LoadOptions
from linnet.runtime.load import bind
from linnet.spec.types import DType
from linnet.weights.dtypes import cast
from linnet_hf.testing import FAMILIES, random_model
from linnet_onnx.backend import OnnxBackend


@pytest.mark.parametrize("dialect", ["standard", "ort"])
@pytest.mark.parametrize("name", FAMILIES)
def test_onnx_of_every_family(name: str, dialect: str, tmp_path: Path) -> None:
    random_model(name, tmp_path / "source")
    model = bind(tmp_path / "source")
    artifact = linnet.onnx.export(model, tmp_path / "onnx", dialect=dialect, verify=True)
    assert artifact.verification is not None
    assert artifact.verification["distance"]["max_abs"] < 1e-4
    back = bind(tmp_path / "onnx")
    for path, parameter in model.parameters.items():
        assert np.array_equal(back.parameters[path].read(), parameter.read()), path


@pytest.mark.parametrize(("dtype", "kl"), [("f32", 1e-9), ("int8", 6e-3), ("int4", 0.4)])
def test_the_real_model_in_onnx_runtime(
    dtype: str, kl: float, smollm2_path: Path, tmp_path: Path
) -> None:
    """Within the bounds that an export has to hold, and near what was measured."""
    artifact = linnet.onnx.export(
        bind(smollm2_path), tmp_path / "out", dtype=dtype, dialect="ort", verify=True
    )
    assert artifact.verification is not None
    assert artifact.verification["distance"]["kl"] < kl
    assert artifact.verification["texts"]["differing"] == []


@pytest.mark.parametrize("dtype", ["f32", "int8", "int4"])
def test_a_damaged_weight_of_a_transposed_family_is_named(dtype: str, tmp_path: Path) -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    random_model("gpt2", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    tensors[name][0, 0] = np.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} has 1 of \d+ values"):
        linnet.onnx.export(bind(tmp_path / "source"), tmp_path / "onnx", dtype=dtype)
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_in_blocks_of_every_family(name: str, dtype: str, tmp_path: Path) -> None:
    """What is read back is off by half a step, or not at all; graphs find every weight."""
    random_model(name, tmp_path / "source")
    model = bind(tmp_path / "source")
    linnet.onnx.export(model, tmp_path / "onnx", dtype=dtype)
    tokens = np.arange(40, dtype=np.int32)[None]
    exported = InferenceSession(tmp_path / "onnx" / "forward.onnx").run(None, {"tokens": tokens})[0]
    options = LoadOptions(dtype=dtype, max_seq=64, threads=2)
    logits = OnnxBackend().load(model, options).run("forward", {"tokens": tokens})
    np.testing.assert_allclose(exported, logits, atol=1e-4)
    back = bind(tmp_path / "onnx")
    assert back.program == model.program
    encoded = 0
    for path, parameter in model.parameters.items():
        values = cast(parameter.read(), DType.F32, path).astype(np.float64)
        found = back.parameters[path]
        assert found.shape == parameter.shape, path
        tensor = found.stored
        if tensor is None or tensor.encoding is None:
            assert np.array_equal(found.read(), values), path
        else:
            encoded += 1
            bits = int(tensor.encoding[3])
            reach = np.abs(values).max() if bits == 8 else np.ptp(values)
            off = np.abs(found.read() - values).max()
            assert 0 < off <= 1.01 * reach / (2 * (127 if bits == 8 else 15)), path
    assert encoded >= 3 * 4

"""Every family as ONNX: ONNX Runtime gives its logits, and Linnet reads the folder back."""

from pathlib import Path

import numpy as np
import pytest

import linnet
from linnet.runtime.load import bind
from linnet_hf.testing import FAMILIES, random_model


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

"""Gemma 3 in bf16, and with the real weights of its 270M: 250 MB of blocks in four packages."""

from pathlib import Path

import numpy as np
import pytest
import torch

import linnet
from linnet.errors import UnavailableError
from linnet.nest.sources import locate
from linnet.runtime.load import bind
from linnet.verification.verify import Bound, verify
from linnet_gguf.export import LLAMACPP
from linnet_hf.testing import random_model


@pytest.fixture(scope="module")
def path() -> Path:
    return locate("gemma3-270m", report=print)


def test_bf16_is_as_near_as_transformers_own(tmp_path: Path) -> None:
    """The embedding's scale is rounded as there; the norms' scales are rounded once more here."""
    made = random_model("gemma3", tmp_path)
    tokens = np.random.default_rng(0).integers(0, 136, (1, 100), dtype=np.int32)
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64))
        exact = made(ids).logits.numpy()
        theirs = made.bfloat16()(ids).logits.float().numpy()
    with linnet.load(tmp_path, backend="torch", mode="eager", dtype="bf16") as model:
        ours = model.session.run("forward", {"tokens": tokens})
    own, allowed = np.abs(ours - exact).mean(), np.abs(theirs - exact).mean()
    assert own < 1.3 * allowed


@pytest.mark.slow
def test_it_knows_the_capital_of_france(path: Path) -> None:
    with linnet.load(path, backend="torch", mode="eager", dtype="f32", max_seq=64) as model:
        answer = model.generate("What is the capital of France?", max_new_tokens=12).text
    assert "The capital of France is Paris." in answer


@pytest.mark.slow
def test_llamacpp_computes_the_same_of_the_same_file(path: Path) -> None:
    """It multiplies blocks with blocks of activations, which alone makes a KL of 4e-3."""
    try:
        LLAMACPP.python()
    except UnavailableError as error:
        pytest.skip(str(error))
    if path.is_dir():
        pytest.skip("the Hub's repository was there first: it has no GGUF file")
    result = verify(bind(path), path, LLAMACPP, Bound(top1=0.95, kl=0.01))
    assert result["distance"]["positions"] == 512
    assert result["texts"] == {"compared": 60, "differing": []}

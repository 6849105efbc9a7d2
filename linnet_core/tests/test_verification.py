"""Verification: an engine is a script; what it answers is measured, and beyond a bound refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from linnet.errors import UnavailableError, VerificationError
from linnet.models.llama import Llama
from linnet.plugins.interfaces import LoadOptions
from linnet.reference.backend import ReferenceBackend
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.testing.text import f0_text
from linnet.verification.engine import Engine, ask, verifier
from linnet.verification.probe import STRINGS
from linnet.verification.verify import Bound, Reference, probe_tokens, verify
from linnet.weights.binding import BoundModel

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
folder = Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
stored = np.load(request["model"])
np.savez(folder / "answer.npz", **stored)
ids = json.loads(Path(request["model"]).with_suffix(".json").read_text())
(folder / "answer.json").write_text(json.dumps({"versions": "echo 1", "ids": ids}))
"""
NUMPY = Reference("f32", "reference")


@pytest.fixture
def model() -> BoundModel:
    checkpoint = random_checkpoint(f0_config(max_position_embeddings=41), seed=1)
    return Llama().bind(replace(checkpoint, text=f0_text()))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """It answers what is stored in the artifact."""
    (tmp_path / "echo.py").write_text(SCRIPT)
    return Engine("echo", tmp_path / "echo.py", "numpy")


def logits_of(model: BoundModel) -> np.ndarray:
    tokens = probe_tokens(model, tokenizer_of(model))
    options = LoadOptions(dtype="f32", max_seq=tokens.shape[1])
    return ReferenceBackend().load(model, options).run("forward", {"tokens": tokens})[0]


def tokenizer_of(model: BoundModel):
    from linnet.runtime.tokenizer import Tokenizer

    return Tokenizer(model.checkpoint.text, model.checkpoint.config)


def artifact(
    model: BoundModel, folder: Path, known: list[list[int]] | None = None, **arrays
) -> Path:
    np.savez(folder / "artifact.npz", **arrays)
    known = known or [tokenizer_of(model).encode(text) for text in STRINGS]
    (folder / "artifact.json").write_text(json.dumps(known))
    return folder / "artifact.npz"


def test_logits_that_are_the_model_s_own_pass(
    model: BoundModel, engine: Engine, tmp_path: Path
) -> None:
    path = artifact(model, tmp_path, logits=logits_of(model))
    found = verify(model, path, engine, Bound(top1=1, kl=0, max_abs=0), reference=NUMPY)
    assert found["distance"]["positions"] == 40
    assert found["texts"] == {"compared": 60, "differing": []}
    assert (found["engine"], found["versions"]) == ("echo", "echo 1")
    json.dumps(found)


def test_listed_log_probabilities_pass_though_the_last_position_says_nothing(
    model: BoundModel, engine: Engine, tmp_path: Path
) -> None:
    logits = logits_of(model)[:-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs)[:, :50]
    path = artifact(model, tmp_path, ids=ids, logprobs=np.take_along_axis(logprobs, ids, 1))
    found = verify(model, path, engine, Bound(top1=1, kl=1e-9), reference=NUMPY)
    assert found["distance"]["listed"] == 50 and found["distance"]["positions"] == 39


def test_what_is_too_far_is_told_figure_by_figure(
    model: BoundModel, engine: Engine, tmp_path: Path
) -> None:
    logits = logits_of(model)
    logits[7] = -logits[7]
    path = artifact(model, tmp_path, logits=logits)
    with pytest.raises(VerificationError) as caught:
        verify(model, path, engine, Bound(top1=0.99, kl=1e-3, max_abs=0.1), reference=NUMPY)
    told = str(caught.value)
    assert "echo (echo 1) is too far from the model, by reference" in told
    assert "top-1 agreement is 0.9750, below 0.99 (the first that differs is position 7)" in told
    assert "kl is " in told and "above 0.001; max_abs is " in told


def test_other_token_ids_are_told_text_by_text(
    model: BoundModel, engine: Engine, tmp_path: Path
) -> None:
    ids = [tokenizer_of(model).encode(text) for text in STRINGS]
    ids[1], *ids[5:9] = [99], [1], [2], [3], [4]
    path = artifact(model, tmp_path, ids, logits=logits_of(model))
    with pytest.raises(VerificationError, match=r"'42' has the token ids \[99\].*and 2 more texts"):
        verify(model, path, engine, Bound(top1=1), reference=NUMPY)


def test_logits_that_are_not_finite_never_pass(
    model: BoundModel, engine: Engine, tmp_path: Path
) -> None:
    logits = logits_of(model)
    logits[3, 5] = np.nan
    path = artifact(model, tmp_path, logits=logits)
    with pytest.raises(VerificationError, match="kl is inf, above 100"):
        verify(model, path, engine, Bound(top1=0, kl=100), reference=NUMPY)


def test_without_a_tokenizer_random_ids_do(engine: Engine, tmp_path: Path) -> None:
    model = Llama().bind(random_checkpoint(f0_config(), seed=1))
    tokens = probe_tokens(model, None)
    assert tokens.shape == (1, 511) and tokens.dtype == np.int32 and tokens.max() < 136


def test_an_engine_that_fails_says_how(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such architecture')")
    engine = Engine("broken", tmp_path / "broken.py", "numpy")
    with pytest.raises(UnavailableError, match=r"status 1 on .*: no such architecture"):
        ask(engine, tmp_path, [1], [], threads=1)


def test_an_engine_that_is_not_there_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine("nowhere", tmp_path / "x.py", "module_of_nowhere")
    with pytest.raises(
        UnavailableError, match="`linnet bench setup nowhere`, or set LINNET_NOWHERE_"
    ):
        verifier({"verify": True}, {"nowhere": engine})
    monkeypatch.setenv("LINNET_NOWHERE_PYTHON", str(tmp_path / "python"))
    with pytest.raises(UnavailableError, match="python, which is to run nowhere, does not exist"):
        engine.python()
    with pytest.raises(UnavailableError, match="'b'; this exporter can run nowhere"):
        verifier({"verify": "b"}, {"nowhere": engine})
    assert verifier({"verify": False}, {"nowhere": engine}) is None

"""Every family against Transformers: the same logits, whatever runs it."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linnet
from linnet.plugins.interfaces import Session
from linnet.weights.checkpoint import Array
from linnet_hf.testing import FAMILIES, MODELS, random_model

TOLERANCE = 1e-4
RUNS = {"reference": ("reference", None), "torch": ("torch", "eager"), "onnx": ("onnx", "ort")}
OTHERS = {
    "jax": ("jax", "jax"),
    "stablehlo": ("jax", "stablehlo"),
    "inductor": ("torch", "inductor"),
}
ROWS, MAX_SEQ = 3, 448


@cache
def saved(name: str, folder: Path) -> tuple[Any, Path]:
    """One random model, saved once."""
    path = folder / name.replace(", ", "-").replace(" ", "-")
    return random_model(name, path), path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def expected(model: Any, tokens: Array) -> Array:
    """What Transformers computes: f32 ``[B, S, V]``."""
    with torch.inference_mode():
        logits: Array = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    return logits


def tokens_of(batch: int, length: int) -> Array:
    return np.random.default_rng([batch, length]).integers(0, 136, (batch, length), dtype=np.int32)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def close(tested: Array, wanted: Array) -> None:
    np.testing.assert_allclose(tested, wanted, atol=TOLERANCE, rtol=0)


def whole(session: Session, model: Any) -> None:
    """400 positions at once, and the same through the cache in two parts."""
    tokens = tokens_of(1, 400)
    wanted = expected(model, tokens)
    close(session.run("forward", {"tokens": tokens}), wanted)
    for start, stop in ((0, 290), (290, 400)):
        inputs = {
            "tokens": tokens[:, start:stop],
            "rows": ints(1),
            "starts": ints(start),
            "lengths": ints(stop - start),
        }
        close(session.run("extend", inputs), wanted[:, stop - 1])


def ragged(session: Session, model: Any) -> None:
    """Rows of 1, 7 and 19 tokens, then steps with one row idle."""
    tokens, lengths = tokens_of(ROWS, 32), ints(1, 7, 19)
    wanted = expected(model, tokens)
    where = {"rows": ints(2, 0, 1), "starts": ints(0, 0, 0), "lengths": lengths}
    got = session.run("extend", {"tokens": tokens[:, :19], **where})
    close(got, wanted[np.arange(ROWS), lengths - 1])
    order = np.array([1, 2, 0])  # which sequence a cache row holds
    for step in range(3):
        at = (lengths + step)[order]
        inputs = {"tokens": tokens[order, at], "positions": np.where(order == 1, -1, at)}
        got = session.run("decode", {k: v.astype(np.int32) for k, v in inputs.items()})
        close(got[order != 1], wanted[order, at][order != 1])


def check(name: str, run: tuple[str, str | None], folder: Path) -> None:
    made, path = saved(name, folder)
    backend, mode = run
    options: Any = {"backend": backend, "mode": mode, "dtype": "f32"}
    with linnet.load(path, rows=ROWS, max_seq=MAX_SEQ, **options) as model:
        whole(model.session, made)
        ragged(model.session, made)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, run: str, folder: Path) -> None:
    check(name, RUNS[run], folder)


@pytest.mark.parametrize(
    "run", ["jax", "stablehlo", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_logits_are_those_of_transformers(name: str, run: str, folder: Path) -> None:
    check(name, OTHERS[run], folder)

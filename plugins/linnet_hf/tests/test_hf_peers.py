"""Peers that read Transformers checkpoints: what they are given, and that they measure right.

What needs a peer's environment is slow, and is skipped where it was not set up.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.bench.environments import environments, state
from linnet.bench.harness import Bench
from linnet.nest.random import write_random
from linnet.plugins.benchmark import Job, Serving, Workload
from linnet.plugins.manager import plugin_manager
from linnet.runtime.load import bind
from linnet.testing.fixtures import f0_config
from linnet_hf.peers import checkpoint
from linnet_hf.plugin import ROWS

SMALL = Workload(prompt_tokens=33, new_tokens=7, runs=2, warmups=1, probe_tokens=6)
MANY = Serving("tiny", 5, 9, 40, 6, in_flight=2, runs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, norms and biases at odd sizes, without a tokenizer."""
    folder = tmp_path_factory.mktemp("peers") / "model"
    write_random(f0_config(), folder, seed=3, dtype="f32")
    return folder


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a shape that every peer takes; the fifth request finds one of two rows free."""
    folder = tmp_path_factory.mktemp("peers") / "square"
    write_random(f0_config(hidden_size=192, head_dim=32), folder, seed=3, dtype="f32")
    return folder


def job(model: Path, folder: Path) -> Job:
    return Job("vllm", str(model), "bf16", 1, SMALL, SMALL.prompts(136), None, str(folder))


def test_every_row_is_registered() -> None:
    methods = plugin_manager().bench_methods
    assert {row[0] for row in ROWS} <= set(methods)
    assert {e.name for e in environments(plugin_manager()).values()} >= {"kerashub", "vllm"}


def test_the_model_s_own_folder_is_read_as_it_is(model: Path, tmp_path: Path) -> None:
    prepared = checkpoint.original(job(model, tmp_path))
    assert prepared.path == str(model)
    assert prepared.notes == ["reads the model's own folder"]
    assert list(tmp_path.iterdir()) == []


def test_linnet_s_export_is_in_the_row_s_dtype(model: Path, tmp_path: Path) -> None:
    prepared = checkpoint.exported(job(model, tmp_path))
    config = json.loads((Path(prepared.path) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert prepared.notes[0] == "reads Linnet's Transformers export in bf16"
    f32 = checkpoint.exported(job(model, tmp_path / "other"), dtype="f32")
    assert f32.weight_bytes == 2 * (prepared.weight_bytes or 0)


def test_what_is_no_folder_is_saved_by_transformers_for_the_original(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM reads then is not of Linnet's making, and has the model's values."""
    bound = bind(model)
    there = replace(bound.checkpoint, location=model / "model.gguf")
    monkeypatch.setattr(checkpoint, "bind", lambda name: replace(bound, checkpoint=there))
    prepared = checkpoint.original(replace(job(model, tmp_path), dtype="f32"))
    assert prepared.notes == [
        "model.gguf is no Transformers folder: reads what Transformers saves of it"
    ]
    saved = bind(prepared.path)
    for path, parameter in bound.parameters.items():
        np.testing.assert_array_equal(saved.parameters[path].read(), parameter.read())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "bound"),
    [
        # KerasHub takes no epsilon of the norms from the config, and is that far off.
        ("kerashub", 0.05),
        ("optimum-onnx", 1e-3),
        ("vllm", 1e-3),
        ("vllm-export", 1e-3),
    ],
)
def test_a_peer_measures_and_agrees(
    model: Path, square: Path, tmp_path: Path, key: str, bound: float
) -> None:
    manager = plugin_manager()
    method = manager.bench_method(key)
    environment = environments(manager)[method.environment]
    if state(environment) != "ready":
        pytest.skip(f"{environment.name} is {state(environment)}: linnet bench setup {key}")
    if key in ("kerashub", "optimum-onnx"):  # they take no head_dim from the config
        model = tmp_path / "square"
        write_random(f0_config(head_dim=8), model, seed=3, dtype="f32")
    if key.startswith("vllm"):  # without AVX-512 its attention takes no head_dim of 16
        model = square
    wanted = [(manager.bench_method("transformers"), "f32"), (method, "f32")]
    results = Bench(str(model), SMALL, 1).run(wanted, lambda row: None)
    row = results["rows"][1]
    assert row["error"] is None
    assert row["metrics"]["decode_tok_s"]["n"] == SMALL.runs
    assert row["distance"]["max_abs"] < bound
    assert row["distance"]["top1"] == 1.0
    assert row["granted"]["threads"] == 1


def serve(square: Path, key: str, bound: float) -> dict[str, Any]:
    manager = plugin_manager()
    wanted = [(manager.bench_method(name), "f32") for name in ("transformers", key)]
    results = Bench(str(square), SMALL, 1, serving=MANY).run(wanted, lambda row: None)
    row: dict[str, Any] = results["rows"][1]
    assert row["error"] is None
    assert row["metrics"]["serve_tok_s"]["n"] == MANY.runs
    assert row["distance"]["max_abs"] < bound
    assert row["distance"]["top1"] >= 0.8
    assert row["granted"]["rows"] == MANY.in_flight
    assert row["granted"]["threads"] == 1
    return row


def test_transformers_batches_continuously_and_agrees(square: Path) -> None:
    row = serve(square, "transformers-batched", 1e-4)
    assert row["distance"]["of"] == "logprobs"
    assert row["distance"]["top1"] == 1.0
    assert row["metrics"]["serve_ttft_ms"]["median"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "bound"),
    [("kerashub-static", 0.05), ("serve-vllm", 1e-3), ("serve-vllm-export", 1e-3)],
)
def test_a_peer_serves_and_agrees(square: Path, key: str, bound: float) -> None:
    manager = plugin_manager()
    environment = environments(manager)[manager.bench_method(key).environment]
    if state(environment) != "ready":
        pytest.skip(f"{environment.name} is {state(environment)}: linnet bench setup {key}")
    row = serve(square, key, bound)
    assert ("serve_ttft_ms" in row["metrics"]) == (key != "kerashub-static")

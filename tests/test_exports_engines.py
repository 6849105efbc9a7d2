"""Exports run by the engines they are for; those that are not installed are skipped by name."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linnet
from linnet.models.llama import Llama
from linnet.runtime.load import bind
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.testing.text import f0_text
from linnet.verification.engine import Engine
from linnet.weights.binding import BoundModel
from linnet_hf.backend import load_model

pytestmark = pytest.mark.slow

VARIANTS: dict[str, dict[str, Any]] = {
    "f0": {},
    "head_dim 8": {"head_dim": 8},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}


def f0(**overrides: Any) -> BoundModel:
    checkpoint = random_checkpoint(f0_config(**overrides), seed=7)
    return Llama().bind(replace(checkpoint, text=f0_text()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_llamacpp_computes_what_linnet_does(variant: str, llamacpp: Engine, tmp_path: Path) -> None:
    model = f0(**VARIANTS[variant])
    artifact = linnet.gguf.export(model, tmp_path / "out", dtype="f32", verify="llamacpp")
    assert artifact.verification is not None
    # Its own cache is f16, which alone keeps it from being closer.
    assert artifact.verification["distance"]["kl"] < 1e-5


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_real_model_in_llamacpp(
    dtype: str, llamacpp: Engine, smollm2_path: Path, tmp_path: Path
) -> None:
    artifact = linnet.gguf.export(bind(smollm2_path), tmp_path / "out", dtype=dtype, verify=True)
    assert artifact.verification is not None
    assert artifact.verification["distance"]["positions"] == 512
    assert artifact.verification["texts"] == {"compared": 60, "differing": []}


def test_the_real_model_in_sglang(sglang: Engine, smollm2_path: Path, tmp_path: Path) -> None:
    artifact = linnet.hf.export(bind(smollm2_path), tmp_path / "out", dtype="bf16", verify="sglang")
    assert artifact.verification is not None
    assert artifact.verification["distance"]["positions"] == 511
    assert artifact.verification["texts"] == {"compared": 60, "differing": []}


def test_the_real_model_in_vllm(vllm: Engine, smollm2_path: Path, tmp_path: Path) -> None:
    artifact = linnet.hf.export(bind(smollm2_path), tmp_path / "out", dtype="bf16", verify="vllm")
    assert artifact.verification is not None
    assert artifact.verification["texts"] == {"compared": 60, "differing": []}


GENERATE = """
import json, sys
from linnet.plugins.benchmark import Job, Prepared, Workload
from linnet_hf.peers.vllm import VLLM

path, prompts = sys.argv[1], json.loads(sys.argv[2])
job = Job("vllm", path, "f32", 2, Workload(), prompts, None, path, Prepared(path))
engine = VLLM()
engine.open(job, 256, 1, 256)
print(json.dumps([engine.generate(prompt, 64).tokens for prompt in prompts]))
"""


def test_vllm_goes_on_alike_from_the_original(
    vllm: Engine, smollm2_path: Path, tmp_path: Path
) -> None:
    """Ten prompts, 64 greedy tokens of each: what vLLM reads of Linnet's and of Transformers'."""
    model = bind(smollm2_path)
    linnet.hf.export(model, tmp_path / "export", dtype="bf16")
    load_model(model, "bf16").save_pretrained(tmp_path / "original")
    draw = np.random.default_rng(5)
    prompts = [draw.integers(0, model.vocab, 20 + 17 * i).tolist() for i in range(10)]
    made = []
    for name in ("original", "export"):
        command = [vllm.python(), "-c", GENERATE, tmp_path / name, json.dumps(prompts)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        made.append(json.loads(done.stdout.splitlines()[-1]))
    assert [len(tokens) for tokens in made[0]] == [64] * 10
    assert made[0] == made[1]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_real_model_in_transformers(dtype: str, smollm2_path: Path, tmp_path: Path) -> None:
    artifact = linnet.hf.export(bind(smollm2_path), tmp_path / "out", dtype=dtype, verify=True)
    assert artifact.verification is not None
    assert artifact.verification["distance"]["max_abs"] == 0
    assert artifact.verification["texts"] == {"compared": 60, "differing": []}

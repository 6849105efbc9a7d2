"""The real model: SmolLM2-135M-Instruct from its GGUF file, against Transformers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import linnet
from linnet.distance import compare
from linnet.runtime.load import bind

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Explain photosynthesis to a child.",
    "List three prime numbers above 100.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
    "What does HTTP stand for?",
    "Count from 1 to 10 in words.",
]


def linnet_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "linnet", *arguments], capture_output=True, text=True, check=False
    )


def test_it_answers(smollm2_path: Path) -> None:
    done = linnet_command("run", str(smollm2_path), "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."


def test_check_against_transformers(smollm2_path: Path) -> None:
    done = linnet_command("check", str(smollm2_path), "--backend", "torch", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["reference"]["backend"] == "transformers"
    (row,) = [
        row for row in report["rows"] if row["backend"] == "torch" and row["entry"] == "forward"
    ]
    assert row["distance"]["max_abs"] <= 1e-3
    assert row["distance"]["top1"] == 1.0


@pytest.fixture(scope="module")
def transformers_model(smollm2_path: Path):
    """Transformers' own model, filled with our dequantized weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    bound = bind(smollm2_path)
    config = AutoConfig.for_model(**bound.checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    weights = {
        path: torch.from_numpy(np.array(parameter.read()))
        for path, parameter in bound.parameters.items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def test_greedy_tokens_equal_those_of_transformers(smollm2_path: Path, transformers_model) -> None:
    import torch

    with linnet.load(smollm2_path, backend="torch", dtype="f32", max_seq=256) as model:
        for prompt in PROMPTS:
            ids = model.chat_ids([{"role": "user", "content": prompt}])
            ours = model.generate(ids, max_new_tokens=64, ignore_eos=True).tokens
            with torch.inference_mode():
                theirs = transformers_model.generate(
                    torch.tensor([ids]),
                    max_new_tokens=64,
                    min_new_tokens=64,
                    do_sample=False,
                    eos_token_id=-1,
                    pad_token_id=0,
                )[0, len(ids) :].tolist()
            assert list(ours) == theirs, prompt


@pytest.mark.slow
def test_our_reading_of_the_file_is_transformers_reading(smollm2_path: Path) -> None:
    """Transformers dequantizes the same GGUF file by its own code: bit-equal weights."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).state_dict()
    for path, parameter in bind(smollm2_path).parameters.items():
        np.testing.assert_array_equal(parameter.read(), theirs[path].numpy(), err_msg=path)


@pytest.mark.slow
def test_the_reference_backend_agrees_with_transformers(
    smollm2_path: Path, transformers_model
) -> None:
    import torch

    tokens = np.random.default_rng(0).integers(0, 49152, (1, 128), dtype=np.int32)
    with linnet.load(smollm2_path, backend="reference", dtype="f32", max_seq=128) as model:
        ours = model.session.run("forward", {"tokens": tokens})
    with torch.inference_mode():
        theirs = transformers_model(torch.from_numpy(tokens).long()).logits.numpy()
    distance = compare(theirs, ours)
    assert distance.max_abs <= 1e-3 and distance.top1 == 1.0

"""llama.cpp as a peer: what it is given, and that it measures right."""

from dataclasses import replace
from pathlib import Path

import pytest

from linnet.bench.environments import environments, state
from linnet.bench.harness import Bench, run_job
from linnet.errors import BenchError
from linnet.models.llama import Llama
from linnet.nest.random import write_random
from linnet.plugins.benchmark import Job, Workload
from linnet.plugins.manager import plugin_manager
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.testing.text import f0_text
from linnet_gguf.export import GGUFExporter
from linnet_gguf.peers.llamacpp import LlamaCpp

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
SMALL = Workload(prompt_tokens=33, new_tokens=7, runs=2, warmups=1, probe_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with norms away from one, and a tokenizer; blocks want rows of 32."""
    checkpoint = random_checkpoint(f0_config(**SHAPE), seed=3)
    bound = Llama().bind(replace(checkpoint, text=f0_text()))
    folder = tmp_path_factory.mktemp("peers") / "model"
    return GGUFExporter().export(bound, folder, {"dtype": "f32"}).files[0]


def job(model: Path, folder: Path, dtype: str) -> Job:
    return Job("llamacpp", str(model), dtype, 1, SMALL, SMALL.prompts(136), None, str(folder))


def test_what_a_step_reads_of_a_file(model: Path, tmp_path: Path) -> None:
    """Every matrix but the embedding, vectors in f32, and keys and values in f16."""
    matrices = 3 * (2 * 6 * 32 * 96 + 2 * 2 * 32 * 96 + 3 * 160 * 96) + 136 * 96
    vectors = 3 * 2 * 96 + 96
    cache = (33 + 3) * 3 * 2 * 2 * 32
    for dtype, size in (("f32", 4), ("bf16", 2), ("q8_0", 34 / 32)):
        prepared = LlamaCpp().prepare(replace(job(model, tmp_path / dtype, dtype)))
        assert prepared.weight_bytes == matrices * size + 4 * vectors + 2 * cache
        assert prepared.notes[0] == f"reads Linnet's GGUF in {dtype}"


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_random(f0_config(), tmp_path / "model", seed=3, dtype="f32")
    with pytest.raises(BenchError, match=r"llama\.cpp loads no model without a tokenizer"):
        LlamaCpp().prepare(job(tmp_path / "model", tmp_path / "out", "f32"))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("f32", 0.02), ("q8_0", 0.5)])
def test_a_peer_measures_and_agrees_llamacpp(
    model: Path, tmp_path: Path, dtype: str, bound: float
) -> None:
    manager = plugin_manager()
    method = manager.bench_method("llamacpp")
    environment = environments(manager)[method.environment]
    if state(environment) != "ready":
        pytest.skip(f"llamacpp is {state(environment)}: linnet bench setup llamacpp")
    if "transformers" not in manager.bench_methods:
        measurement = run_job(method, job(model, tmp_path, dtype))
        assert [len(run.tokens) for run in measurement.runs] == [7, 7]
        return
    wanted = [(manager.bench_method("transformers"), "f32"), (method, dtype)]
    reference, row = Bench(str(model), SMALL, 1).run(wanted, lambda row: None)["rows"]
    assert reference["error"] is None
    assert row["error"] is None
    assert row["metrics"]["decode_tok_s"]["n"] == SMALL.runs
    assert row["distance"]["of"] == "logprobs"
    assert row["distance"]["listed"] == 136
    assert row["distance"]["max_abs"] < bound

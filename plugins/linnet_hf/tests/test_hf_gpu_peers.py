"""Engines that need a GPU: TGI's side of it by a stand-in that speaks its HTTP, SGLang itself.

SGLang is run on the processor by its plain PyTorch, which is no figure for a page: what is tested
is that it is driven right, and what it computes.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.bench.environments import clean_variables, environments, state
from linnet.bench.harness import run_job
from linnet.bench.machine import has_gpu
from linnet.bench.results import row_of
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run, Serve, Serving, Workload
from linnet.plugins.manager import plugin_manager
from linnet_hf.engines import sglang_engine
from linnet_hf.peers.probe import follow
from linnet_hf.peers.tgi import TGI, ServeTGI, ServeTGIExport, TGIExport
from linnet_hf.testing import model_with_text

WORKLOAD = Workload(prompt_tokens=33, new_tokens=7, runs=2, warmups=1, probe_tokens=6)
MANY = Serving("tiny", 5, 9, 40, 6, in_flight=2, runs=2)
STAND_IN = Path(__file__).with_name("tgi_launcher.py")


def job(key: str, model: Path, folder: Path, dtype: str = "bf16", **settings: Any) -> Job:
    prompts = WORKLOAD.prompts(131)
    folder.mkdir(exist_ok=True)
    return Job(key, str(model), dtype, 2, WORKLOAD, prompts, None, str(folder), **settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu peers") / "model"
    model_with_text("qwen2, square", folder)
    return folder


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins of TGI's launcher and of the driver's tool, on the PATH."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, line in (
        ("text-generation-launcher", f'exec "{sys.executable}" "{STAND_IN}" "$@"'),
        ("nvidia-smi", "echo 1234"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
@pytest.mark.parametrize("key", ["sglang", "serve-sglang-export", "tgi", "serve-tgi"])
def test_without_a_gpu_the_row_says_so(key: str, model: Path, tmp_path: Path) -> None:
    """Before its environment is asked for: nobody needs to set it up to learn that."""
    method = plugin_manager().bench_method(key)
    with pytest.raises(BenchError, match="needs a GPU, and this machine has none"):
        run_job(method, job(key, model, tmp_path / "job"))


def test_without_its_launcher_tgi_says_where_it_comes_from(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="text-generation-launcher is not on the PATH"):
        TGI().measure(job("tgi", model, tmp_path / "job"))


@pytest.mark.parametrize("method", [TGI, TGIExport])
def test_tgi_is_timed_and_followed(
    method: type[TGI], model: Path, launcher: None, tmp_path: Path
) -> None:
    asked = replace(job("tgi", model, tmp_path / "job"), forced=[5, 6, 7, 8, 5, 6])
    measured = method().measure(asked)
    assert [len(run.tokens) for run in measured.runs] == [7, 7]
    assert measured.tokens == asked.forced
    assert measured.granted["model_dtype"] == "bfloat16"
    assert (measured.peak_bytes, measured.memory) == (1234 << 20, "reserved")
    found = np.load(tmp_path / "job" / "probe.npz")
    assert found["ids"].shape == found["logprobs"].shape == (7, 64)
    row = row_of(plugin_manager().bench_method("tgi"), asked, measured, None, 1e9)
    assert row["metrics"]["decode_tok_s"]["n"] == 2
    assert any("decoded and tokenized again" in note for note in row["notes"])
    assert any("began anew" in note for note in row["notes"])


@pytest.mark.parametrize("method", [ServeTGI, ServeTGIExport])
def test_tgi_serves_and_texts_that_end_count_as_they_are(
    method: type[ServeTGI], model: Path, launcher: None, tmp_path: Path
) -> None:
    requests = MANY.prompts(131)
    requests[1][3][-1] = 9  # the stand-in ends after one token
    asked = job("serve-tgi", model, tmp_path / "job", serving=MANY, requests=requests)
    measured = method().measure(asked)
    assert [len(tokens) for tokens in measured.serves[0].tokens] == [6, 6, 6, 1, 6]
    row = row_of(plugin_manager().bench_method("serve-tgi"), asked, measured, None, 1e9)
    first = measured.serves[0]
    assert row["metrics"]["serve_tok_s"]["values"][0] == pytest.approx(25 / first.seconds)
    assert any("ended before their length" in note for note in row["notes"])


def test_a_launcher_that_ends_is_quoted(model: Path, launcher: None, tmp_path: Path) -> None:
    """And nothing of it is left."""
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((model / name).read_bytes())

    class Bare(TGI):
        def checkpoint(self, job: Job) -> Prepared:
            return Prepared(str(tmp_path / "bare"))

    with pytest.raises(BenchError, match=r"ended with status 1: Error: no tokenizer\.json"):
        Bare().measure(job("tgi", model, tmp_path / "job"))


def test_a_model_without_a_tokenizer_is_not_for_tgi(
    model: Path, launcher: None, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((model / name).read_bytes())
    with pytest.raises(BenchError, match="has no tokenizer"):
        TGI().measure(job("tgi", tmp_path / "bare", tmp_path / "job"))


@pytest.mark.parametrize(
    ("lengths", "fixed", "fault"),
    [
        ([7, 7], True, None),
        ([7, 6], True, "run 2 gave 6 tokens, not 7"),
        ([7, 6], False, None),
        ([7, 1], False, "run 2 gave 1 tokens, not 7"),
        ([7, 8], False, "run 2 gave 8 tokens, not 7"),
    ],
)
def test_a_length_counts_only_where_it_may_differ(
    lengths: list[int], fixed: bool, fault: str | None, model: Path, tmp_path: Path
) -> None:
    runs = [Run(5.0, 2.0, [0] * length) for length in lengths]
    measured = Measurement(runs, 1.0, 1.0, 1, "resident", {}, fixed_length=fixed)
    asked = job("tgi", model, tmp_path / "job")
    method = plugin_manager().bench_method("tgi")
    if fault is None:
        values = row_of(method, asked, measured, None, 1e9)["metrics"]["decode_tok_s"]["values"]
        assert values == [(length - 1) / 2.0 for length in lengths]
    else:
        with pytest.raises(BenchError, match=fault):
            row_of(method, asked, measured, None, 1e9)


@pytest.mark.parametrize("length", [0, 7])
def test_serving_counts_no_text_that_is_empty_or_too_long(
    length: int, model: Path, tmp_path: Path
) -> None:
    serves = [Serve(1.0, [], [[0] * 6] * 4 + [[0] * length])]
    measured = Measurement([], 1.0, 1.0, 1, "resident", {}, serves=serves, fixed_length=False)
    asked = job("serve-tgi", model, tmp_path / "job", serving=MANY)
    with pytest.raises(BenchError, match="its speed is void"):
        row_of(plugin_manager().bench_method("serve-tgi"), asked, measured, None, 1e9)


def test_the_probe_begins_anew_where_tokens_part(model: Path, tmp_path: Path) -> None:
    """An engine whose next token is the length of its prompt, following others' tokens."""
    asked = replace(job("tgi", model, tmp_path / "job"), forced=[33, 34, 0, 36, 0, 38])
    prompts: list[int] = []

    def decode(prompt: list[int], wanted: int) -> list[tuple[int, int]]:
        prompts.append(len(prompt))
        assert prompt[33:] == (asked.forced or [])[: len(prompt) - 33]
        return [(len(prompt) + i, len(prompt) + i) for i in range(wanted)]

    probe = follow(asked, decode)
    assert probe.tokens == asked.forced
    assert probe.rows == list(range(33, 40))
    assert (probe.restarts, prompts) == (2, [33, 36, 38])
    free = follow(replace(asked, forced=None), decode)
    assert (free.tokens, free.restarts) == (list(range(33, 39)), 0)


ON_A_PROCESSOR = """
import sys
from pathlib import Path
sys.path.insert(0, ENGINES)
import sglang_engine
from linnet.plugins.benchmark import Job
from linnet_hf.peers.sglang import SGLang, ServeSGLang

OPTIONS = dict(
    device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
    disable_cuda_graph=True, disable_overlap_schedule=True,
)

if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    method = ServeSGLang() if job.serving else SGLang()
    method.options = OPTIONS
    method.measure(job).save(Path(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("serving", [False, True])
def test_sglang_measures_and_agrees(serving: bool, model: Path, tmp_path: Path) -> None:
    manager = plugin_manager()
    environment = environments(manager)["sglang"]
    if state(environment) != "ready":
        pytest.skip(f"sglang is {state(environment)}: linnet bench setup sglang")
    asked = replace(
        job("sglang", model, tmp_path / "job", dtype="f32", prepared=Prepared(str(model))),
        forced=[5, 6, 7, 8, 5, 6],
        serving=MANY if serving else None,
        requests=MANY.prompts(131) if serving else [],
    )
    asked.save(tmp_path / "job.json")
    script = tmp_path / "script.py"
    folder = str(Path(sglang_engine.__file__).parent)
    script.write_text(ON_A_PROCESSOR.replace("ENGINES", json.dumps(folder)))
    command = [environment.python, script, tmp_path / "job.json", tmp_path / "result.json"]
    done = subprocess.run(
        command, env=clean_variables(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = Measurement.read(tmp_path / "result.json")
    method = manager.bench_method("serve-sglang" if serving else "sglang")
    tokens = np.array([[*asked.prompts[-1], *(asked.forced or [])]])
    row = row_of(method, asked, measured, reference(model, tokens), 1e9)
    assert row["distance"]["top1"] == 1.0
    assert row["distance"]["kl"] < 1e-6
    assert measured.tokens == asked.forced
    assert measured.granted["prefix_caching"] is False
    assert measured.granted["rows"] == (MANY.in_flight if serving else 1)


def reference(folder: Path, tokens: Any) -> Any:
    """Transformers' logits f32 ``[probe_tokens + 1, V]`` of a prompt and what follows."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.from_numpy(tokens)).logits
    return logits[0, WORKLOAD.prompt_tokens - 1 :].numpy()

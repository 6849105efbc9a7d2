"""``linnet bench`` from end to end, on a model small enough to take seconds."""

import json
import subprocess
import sys

import pytest

from linnet.nest.random import write_random
from linnet.testing.fixtures import f0_config


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("bench")
    write_random(f0_config(), folder / "model", seed=0, dtype="f32")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "linnet", "bench", str(folder / "model")),
            *("--methods", "linnet-torch-eager,transformers", "--dtype", "f32"),
            *("--prompt-tokens", "33", "--new-tokens", "7", "--runs", "2"),
            *("-o", str(folder / "results.json"), "--json"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((folder / "results.json").read_text())
    assert saved == json.loads(done.stdout)
    return saved


def test_every_row_was_measured(results: dict) -> None:
    assert [(row["key"], row["error"]) for row in results["rows"]] == [
        ("transformers", None),  # the reference goes first
        ("linnet-torch-eager", None),
    ]
    for row in results["rows"]:
        assert row["metrics"]["decode_tok_s"]["n"] == 2
        assert row["granted"]["dtype"] == "f32"


def test_each_speed_stands_beside_its_distance(results: dict) -> None:
    reference, ours = (row["distance"] for row in results["rows"])
    assert reference["max_abs"] == 0
    assert ours["max_abs"] <= 1e-4
    assert ours["top1"] == 1.0


def test_what_is_not_there_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "linnet", "bench", "x", "--methods", "abacus"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "abacus" in done.stderr

"""What mode ``inductor`` compiles, when, and what it keeps for the next start."""

import ast
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linnet.errors import UnavailableError
from linnet.testing.backends import ints, tokens_of
from linnet_torch import cache, kernels
from linnet_torch.session import TorchSession

Load = Callable[..., TorchSession]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, with nothing in it."""
    monkeypatch.setenv("LINNET_HOME", str(tmp_path))
    yield tmp_path / "torch"


def prompt(session: Any, length: int, row: int = 0, start: int = 0, seed: int = 0) -> np.ndarray:
    tokens = tokens_of(1, length, seed=seed)
    where = {"rows": ints(row), "starts": ints(start), "lengths": ints(length)}
    return session.run("extend", {"tokens": tokens, **where})[0]


def test_a_second_start_compiles_nothing(load: Load, home: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    step = {"tokens": ints(3), "positions": ints(7)}
    results = []
    for start in ("first", "second"):
        session: Any = load(mode="inductor", rows=1, max_seq=100)
        assert session.graphs == {}
        results.append([prompt(session, 7), session.run("decode", step)])
        assert session.graphs == dict.fromkeys(("prompt", "decode"), start == "first")
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    told = [record.message for record in caplog.records if "compiling" in record.message]
    assert [message.split(":")[0] for message in told] == ["compiling prompt", "compiling decode"]
    files = sorted(path.name.partition("-")[0] for path in home.iterdir())
    assert [name for name in files if name != "kernels"] == ["decode", "prompt"]


def test_no_prompt_length_compiles_anything_new(load: Load) -> None:
    session: Any = load(mode="inductor", rows=2, max_seq=448)
    eager: Any = load(mode="eager", rows=2, max_seq=448)
    prompt(session, 9)
    prompt(session, 9, start=9)
    warm = dict(session.graphs)
    assert set(warm) == {"prompt", "chunk", "decode"}
    draw = np.random.default_rng(0)
    for seed, length in enumerate(draw.integers(2, 300, 100).tolist()):
        for start in (0, length):
            if start + length > 448:
                continue
            ours = prompt(session, length, row=1, start=start, seed=seed)
            if seed % 10 == 0:
                theirs = prompt(eager, length, row=1, start=start, seed=seed)
                np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)
            else:
                prompt(eager, length, row=1, start=start, seed=seed)
    assert session.graphs == warm


def test_source_is_the_step_and_the_prompt(load: Load) -> None:
    text = load(mode="inductor").source()
    assert "torch.ops.linnet.linear(x, w.qkv_proj.weight)" in text
    assert text.count("needs torch and Linnet's operators") == 2
    ast.parse(text)


def test_many_rows_use_products_of_matrices(load: Load) -> None:
    few = kernels.few_rows(torch.float32)
    for rows in (few, few + 1):
        session: Any = load(mode="inductor", rows=rows)
        assert ("torch.ops.linnet.linear" in session._step.text) == (rows == few)


def test_a_build_that_fails_leaves_nothing(home: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.built("x.so", fail)
    assert list(home.iterdir()) == []


def test_a_machine_without_a_compiler(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnavailableError, match="no C\\+\\+ compiler was found"):
        kernels._compiler()

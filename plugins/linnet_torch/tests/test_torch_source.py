"""The generated file: what it looks like, and that it stands on its own.

Run this file as a script to write the golden file anew, then read the difference.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from linnet.plugins.manager import plugin_manager
from linnet.spec import Program, from_json, to_json
from linnet.spec.layout import wrap
from linnet.spec.ops import CALLS, PRIMITIVES
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet_torch.generated import load_module
from linnet_torch.ops import CLAIMED, RULES
from linnet_torch.source import generate

GOLDEN = Path(__file__).parent / "golden" / "f0.py.txt"

EVERYTHING = {
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 7,
}


def program_of(**changes: object) -> Program:
    manager = plugin_manager()
    return manager.implementation(manager.family("llama")).program(f0_config(**changes))


@pytest.fixture(scope="module")
def text() -> str:
    return generate(program_of()).text


def test_the_golden_file(text: str) -> None:
    assert text == GOLDEN.read_text(), f"if this is meant, run: python {Path(__file__).name}"


def test_the_same_program_gives_the_same_file(text: str) -> None:
    assert generate(from_json(to_json(program_of()))).text == text


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["f0", "everything"])
def test_it_is_formatted(changes: dict[str, object], numerics: str) -> None:
    source = generate(program_of(**changes), numerics).text
    assert max(map(len, source.splitlines())) <= 100
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:{Path('/usr/bin')}")
    if ruff is None:
        pytest.skip("ruff is not installed")
    command = [ruff, "format", "--isolated", "--line-length", "100", "--diff", "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_one_function_for_each_kind_of_block(text: str) -> None:
    functions = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    blocks = [name for name in functions if name.startswith(("attention", "layer", "mlp", "model"))]
    assert blocks == [
        "attention",
        "mlp",
        "layer",
        "model",
        "attention_cached",
        "layer_cached",
        "model_cached",
    ]
    assert len(functions) == len(set(functions))
    assert "for i in range(3):" in text


def test_only_the_helpers_that_are_called(text: str) -> None:
    for absent in ("layer_norm", "def take", "def write", "gelu"):
        assert absent not in text
    assert "def gumbel" in text


def test_no_value_shadows_a_function(text: str) -> None:
    tree = ast.parse(text)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    stored = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert not functions & stored


def test_every_primitive_and_claimed_composite_is_known() -> None:
    named = {"parameter", "state_read", "state_write", *CALLS}
    assert set(PRIMITIVES) - named <= set(RULES)
    assert set(CLAIMED) - {"attention"} <= set(RULES)


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["f0", "everything"])
def test_the_file_runs_with_torch_alone(changes: dict[str, object], tmp_path: Path) -> None:
    """In a process that cannot import Linnet; the usage in its docstring is what is run."""
    checkpoint = random_checkpoint(f0_config(**changes), seed=0)
    tensors = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    np.savez(tmp_path / "weights.npz", **tensors)
    source = generate(program_of(**changes)).text
    (tmp_path / "model.py").write_text(source)
    usage = [line.strip() for line in source.splitlines()[4:9]]
    assert usage[0].startswith("w = weights(tensors)")
    script = [
        "import sys, numpy, torch",
        "from model import *",
        "tensors = {k: torch.from_numpy(v) for k, v in numpy.load('weights.npz').items()}",
        "tokens = torch.arange(1, 8)[None]",
        *usage,
        "logits = forward(w, torch.cat((tokens, token[None]), dim=1))",
        "print(logits[0, -2].argmax().item(), logits.isfinite().all().item())",
        "assert not any(name.startswith('linnet') for name in sys.modules)",
        "assert token.shape == (1,)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "True"


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools")
def test_torch_compile_takes_it_whole(text: str) -> None:
    """No graph break, and one graph for every position."""
    module = load_module(text, "f0")
    tensors = {
        name: torch.from_numpy(tensor.read().copy())
        for name, tensor in random_checkpoint(f0_config(), seed=0).tensors.items()
    }
    w, state = module.weights(tensors), module.caches(2, 32, dtype=torch.float32)
    counter = CompileCounter()
    step = torch.compile(module.decode_greedy, fullgraph=True, backend=counter)
    with torch.inference_mode():
        for position in range(4):
            tokens, positions = torch.tensor([3, 4]), torch.tensor([position, -1])
            chosen = step(w, state, tokens, positions, end=32)
            again = module.decode_greedy(w, state, tokens, positions, end=position + 1)
            assert chosen[0] == again[0]
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("    y = f(a, b)", ["    y = f(a, b)"]),
        ("y = f(aaaaaa, g(bbbbbb))", ["y = f(", "    aaaaaa, g(bbbbbb)", ")"]),
        (
            "y = f(aaaaaaaaa, g(bb, cc), dddddd)",
            ["y = f(", "    aaaaaaaaa,", "    g(bb, cc),", "    dddddd,", ")"],
        ),
    ],
)
def test_long_lines_are_broken(line: str, lines: list[str]) -> None:
    assert wrap(line, width=22) == lines


if __name__ == "__main__":
    GOLDEN.write_text(generate(program_of()).text)
    print(f"wrote {GOLDEN}")

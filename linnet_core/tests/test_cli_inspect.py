"""What ``linnet inspect`` shows, and where a backend's source comes from."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from linnet.cli.inspect import _short, generated_source, print_summary, summary
from linnet.cli.output import print_json
from linnet.errors import PluginError, UnavailableError
from linnet.plugins.descriptors import Backend, Capability
from linnet.plugins.discovery import FoundPlugin
from linnet.plugins.manager import PluginManager
from linnet.plugins.registration import RegisteredPlugin
from linnet.spec.program import Function, Parameter, Program, State, Value
from linnet.spec.types import DType, TensorType
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Checkpoint, StoredTensor


def unread() -> Any:
    raise AssertionError("inspecting reads no tensor")


TOKENS = Value(0, TensorType(DType.I32, ("B", "S")), "tokens")
LOGITS = Value(1, TensorType(DType.F32, ("B", "S", 7)))
FORWARD = Function("forward", (TOKENS,), (), (LOGITS,))
PROGRAM = Program(
    "toy",
    (Parameter("embed", (7, 3), "embedding"), Parameter("head", (7, 3), "linear", "embed")),
    (State("layers.0.k", TensorType(DType.FLOAT, ("R", "T", 2, 16))),),
    {},
    {"forward": FORWARD},
)
TENSORS = {"embed": StoredTensor("embed", (7, 3), DType.F32, unread, "q8_0")}
CHECKPOINT = Checkpoint(Path("a/b"), "gguf", {}, TENSORS, notes=("no tokenizer",))
BOUND = BoundModel(PROGRAM, CHECKPOINT, {}, 7, None, {"hidden": 3}, ("theta not stated",))

BACKEND = Backend(
    name="writer",
    target="test:Writer",
    title="Writer",
    modes=("eager",),
    devices=("cpu",),
    dtypes=("f32",),
    capabilities=frozenset({Capability.FORWARD, Capability.SOURCE}),
    api_version=1,
)


class Loading:
    """A backend that only a loaded session can show the source of."""

    closed = False

    def load(self, model: BoundModel, options: Any) -> Any:
        return self

    def source(self) -> str | None:
        return "loaded"

    def close(self) -> None:
        self.closed = True


class Emitting:
    def source(self, model: BoundModel, options: Any) -> str:
        return f"emitted {model.program.family}"


class Silent:
    def source(self, model: BoundModel, options: Any) -> None: ...


Install = Callable[[Backend, Any], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def set_up(descriptor: Backend, implementation: Any) -> None:
        manager = PluginManager(
            [RegisteredPlugin(FoundPlugin("w", "w", "w-dist", "1"), (descriptor,))]
        )
        monkeypatch.setattr(manager, "implementation", lambda asked: implementation)
        monkeypatch.setattr("linnet.plugins.manager.plugin_manager", lambda: manager)

    return set_up


def test_the_summary_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(summary(BOUND))
    about = json.loads(capsys.readouterr().out)
    assert len(about.pop("fingerprint")) == 64
    assert about == {
        "location": "a/b",
        "format": "gguf",
        "family": "toy",
        "config": {"hidden": 3},
        "vocab": 7,
        "max_positions": None,
        "parameters": 21,
        "bytes": 84,
        "stored": {"q8_0": 1},
        "tied": {"head": "embed"},
        "states": {"layers.0.k": "float[R, T, 2, 16]"},
        "entries": {"forward": "(tokens: i32[B, S]) -> f32[B, S, 7]"},
        "functions": {},
        "notes": ["no tokenizer", "theta not stated"],
    }


def test_the_summary_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(BOUND))
    printed = capsys.readouterr()
    for line in (
        "format         gguf (1 q8_0 tensors)",
        "parameters     21",
        "tied head      to embed",
        "max positions  not stated",
        "1 times  float[R, T, 2, 16]",
        "forward  (tokens: i32[B, S]) -> f32[B, S, 7]",
    ):
        assert line in printed.out.splitlines()
    assert printed.err == "note: no tokenizer\nnote: theta not stated\n"


def test_source_of_a_backend_that_emits(install: Install) -> None:
    install(BACKEND, Emitting())
    assert generated_source(BOUND, "writer") == "emitted toy"


def test_source_of_a_backend_that_must_load(install: Install) -> None:
    backend = Loading()
    loader = type("Loader", (), {"load": backend.load})()
    install(BACKEND, loader)
    assert generated_source(BOUND, "writer") == "loaded"
    assert backend.closed


def test_no_source(install: Install) -> None:
    install(BACKEND, Silent())
    with pytest.raises(UnavailableError, match="the writer backend showed no source"):
        generated_source(BOUND, "writer")
    install(replace(BACKEND, capabilities=frozenset({Capability.FORWARD})), Emitting())
    with pytest.raises(UnavailableError, match="generates no source; those that do: none"):
        generated_source(BOUND, "writer")
    with pytest.raises(PluginError, match=r'pip install "linnet\[torch\]"'):
        generated_source(BOUND, "torch")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "1e-05"),
        (None, "None"),
        ((None,) * 30, "30 times None"),
        ((4, 5), "[4, 5]"),
        ((4,), "[4]"),
        ((), "[]"),
        (tuple(range(32)), "[0, 1, 2, ..., 31]"),
        ({"theta": 5e5, "factors": [1, 1]}, "theta 500000.0, factors 2 times 1"),
    ],
)
def test_long_values_are_shortened(value: Any, text: str) -> None:
    assert _short(value) == text

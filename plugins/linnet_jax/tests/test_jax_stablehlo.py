"""The StableHLO that is written: every op has a lowering, and an export runs without Linnet."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jaxlib.mlir.dialects import stablehlo
from safetensors.numpy import load_file

import linnet
from linnet.errors import CheckpointError, UnavailableError
from linnet.spec.ops import CALLS, PRIMITIVES
from linnet.testing.backends import bind, tokens_of
from linnet_jax.backend import JaxBackend
from linnet_jax.stablehlo_compiler import compile_text
from linnet_jax.stablehlo_ops import BINARY, COMPARE, SPECIAL, UNARY

OPTIONS = {"rows": 1, "max_seq": 32, "prompt": 12}


def test_every_primitive_has_a_lowering() -> None:
    named = {"parameter", "state_read", "state_write", *CALLS}
    assert set(PRIMITIVES) - named <= {*UNARY, *BINARY, *COMPARE, *SPECIAL}


@pytest.mark.parametrize("name", ["f0", "tied"])
def test_an_export_runs_by_its_manifest_alone(name: str, tmp_path: Path) -> None:
    """The portable bytecode, compiled by XLA: the prompt's token, then a step."""
    artifact = linnet.stablehlo.export(bind(name), tmp_path / "out", **OPTIONS)
    assert {path.name for path in artifact.files} >= {"weights.safetensors", "manifest.json"}
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    weights = load_file(tmp_path / "out/weights.safetensors")
    device = jax.devices("cpu")[0]

    def run(entry: str, states: list[object], *inputs: np.ndarray) -> list[jax.Array]:
        code = (tmp_path / f"out/{entry}.mlirbc").read_bytes()
        told = manifest["entries"][entry]
        assert [list(array.shape) for array in inputs] == [i["shape"] for i in told["inputs"]]
        arrays = [weights[path] for path in told["weights"]]
        arguments = jax.device_put([*arrays, *states, *inputs], device)
        text = stablehlo.deserialize_portable_artifact_str(code)
        executable = compile_text(text, device)
        results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [result for (result,) in results]

    tokens = tokens_of(1, 12)
    (whole,) = run("forward", [], tokens)
    states = [np.zeros((1, 32, 2, 16), np.float32) for _ in manifest["entries"]["decode"]["states"]]
    where = [np.array([n], np.int32) for n in (0, 0, 12)]
    token, *states = run("extend_greedy", states, tokens, *where)
    assert int(token[0]) == int(np.argmax(np.asarray(whole)[0, -1]))
    logits, *_ = run("decode", states, np.asarray(token), np.array([12], np.int32))

    session = JaxBackend().load(bind(name), linnet.plugins.interfaces.LoadOptions(max_seq=32))
    longer = np.concatenate((tokens, np.asarray(token)[None]), axis=1)
    expected = session.run("forward", {"tokens": longer})
    np.testing.assert_allclose(whole, expected[:, :-1], atol=1e-4)
    np.testing.assert_allclose(logits, expected[:, -1], atol=1e-4)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for wrong, word in (
        ({"quality": 1}, "quality"),
        ({"dtype": "q8_0"}, "q8_0"),
        ({"rows": 0}, "rows"),
        ({"prompt": 40, "max_seq": 32}, "prompt"),
        ({"platform": "abacus"}, "abacus"),
    ):
        with pytest.raises(UnavailableError, match=word):
            linnet.stablehlo.export(bind("f0"), tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match="empty"):
        linnet.stablehlo.export(bind("f0"), tmp_path, **OPTIONS)
    assert (tmp_path / "mine").read_text() == "kept"

"""Checkpoints of weights in blocks: what is read back, and what a damaged folder is told."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linnet
from linnet.errors import CheckpointError, LinnetError
from linnet.plugins.interfaces import LoadOptions
from linnet.runtime.load import bind as load
from linnet.spec.types import DType
from linnet.testing.backends import bind, tokens_of
from linnet.testing.text import f0_text
from linnet.weights.checkpoint import Array
from linnet.weights.safetensors import Entry, read_file, write_file
from linnet_onnx.backend import OnnxBackend
from linnet_onnx.blocks import decode, encode


@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from([8, 4]), st.integers(0, 2**32 - 1))
def test_decoding_is_off_by_half_a_step(rows: int, width: int, bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, width)) * rng.choice([0, 1e-3, 50])).astype(np.float32)
    codes, scales, zeros = encode(values, bits)
    back = decode(codes, scales, zeros, width)
    assert back.shape == values.shape
    steps = np.repeat(scales, 32, -1)[:, :width]
    # A zero of an int4 block is a whole number, so that an end may lie half a step further out.
    assert (np.abs(back - values) <= (0.5 if bits == 8 else 1.0) * steps * 1.0001).all()
    again = encode(back, bits)
    assert np.abs(decode(*again, width) - back).max() <= steps.max() * (1e-5 if bits == 8 else 1.0)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_numbers_have_finite_scales(bits: int) -> None:
    values = np.array([[3e38, -3e38, 1e38] + [0.0] * 40], np.float32)
    codes, scales, zeros = encode(values, bits)
    back = decode(codes, scales, zeros, values.shape[1])
    assert np.isfinite(back).all()
    assert np.abs(back - values).max() <= scales.max()


@pytest.fixture(scope="module", params=["int8", "int4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model's, whose embedding lies there in f32 and, as the head, in blocks."""
    out: Path = tmp_path_factory.mktemp(request.param) / "out"
    model = bind("tied")
    model = replace(model, checkpoint=replace(model.checkpoint, text=f0_text()))
    linnet.onnx.export(model, out, dtype=request.param)
    return out


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A copy, elsewhere, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "own"))


def logits(source: Path, tokens: Array, dtype: str) -> Array:
    options = LoadOptions(dtype=dtype, max_seq=48, threads=2)
    return OnnxBackend().load(load(source), options).run("forward", {"tokens": tokens})


def test_a_folder_is_read_back_wherever_it_lies(own: Path) -> None:
    """As f32 it computes what its own graphs do, but for activations in 8 bits and the head."""
    model = load(own)
    dtype = json.loads((own / "linnet-onnx.json").read_text())["dtype"]
    assert model.checkpoint.format == "onnx-blocks"
    # The head, which beside int4 is in int8, is read as the embedding.
    assert model.checkpoint.notes == (f"matrices in {dtype} blocks of 32, read as f32",)
    assert model.checkpoint.text.tokenizer == f0_text().tokenizer
    assert model.parameters["model.embed_tokens.weight"].read().shape == (136, 48)
    tokens = tokens_of(1, 40)
    plain, encoded = logits(own, tokens, "f32"), logits(own, tokens, dtype)
    off = (plain - encoded).std() / plain.std()
    assert off < (0.03 if dtype == "int8" else 0.3)
    assert (plain.argmax(-1) == encoded.argmax(-1)).mean() > 0.8


def test_the_file_itself_can_be_named(own: Path) -> None:
    assert load(own / "model.blocks").checkpoint.location == own
    shutil.copy(own / "model.blocks", own / "other.blocks")
    with pytest.raises(CheckpointError, match=r"other\.blocks: only model\.blocks is known"):
        load(own / "other.blocks")


def rewrite(own: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = own / "linnet-onnx.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("blocks"), "lists no matrices in blocks"),
        (lambda m: m.update(blocks=[1]), "lists no matrices in blocks"),
        (lambda m: m["blocks"].update({NAME: 7}), rf"blocks has 7 for '{NAME}'"),
        (lambda m: m["blocks"][NAME].update(bits=5), "'bits': 5"),
        (lambda m: m["blocks"][NAME].update(bits=True), "'bits': True"),
        (lambda m: m["blocks"][NAME].update(shape=[80]), r"'shape': \[80\]"),
        (lambda m: m["blocks"][NAME].update(shape=[80, -48]), r"-48"),
        (lambda m: m["blocks"][NAME].update(shape=[80, 65]), r"of a matrix \[80, 65\] are uint8"),
        (lambda m: m["blocks"][NAME].update(shape=[1 << 60, 1 << 60]), "are uint8"),
        (lambda m: m["blocks"].update(ghost=m["blocks"][NAME]), "has no ghost.int"),
        (lambda m: m["blocks"].pop(NAME), "not used"),
        (lambda m: m["blocks"][NAME].update(shape=[True, 48]), r"\[True, 48\]"),
        (lambda m: m["blocks"][NAME].update(shape=[10**4200, 48]), r"'shape': \[1000"),
        (lambda m: m["blocks"].update({"x" * 10**6: m["blocks"][NAME]}), "for 'x{80}'"),
        (lambda m: m["blocks"].update({"\x1b[31m": m["blocks"][NAME]}), r"'\\x1b\[31m'"),
        (lambda m: m["blocks"][NAME].update(plain=True), f"{NAME} in f32 is missing"),
        (lambda m: m.update(schema=2), "has the schema '2'; this Linnet reads 1"),
    ],
)
def test_a_manifest_that_lies_is_told_so(
    change: Callable[[dict[str, Any]], None], message: str, own: Path
) -> None:
    rewrite(own, change)
    with pytest.raises(LinnetError, match=message) as raised:
        load(own)
    assert len(str(raised.value)) < 1000


def test_files_that_are_not_there_are_named(own: Path) -> None:
    (own / "linnet-onnx.json").unlink()
    with pytest.raises(CheckpointError, match=r"linnet-onnx\.json does not exist"):
        load(own)


def change_tensor(own: Path, name: str, change: Callable[[Array], Array], dtype: DType) -> None:
    tensors = read_file(own / "model.blocks")
    values = {t.name: t.read().copy() for t in tensors.values()}
    values[name] = change(values[name])
    kinds = {t.name: t.dtype for t in tensors.values()} | {name: dtype}
    entries = [
        Entry(key, kinds[key], array.shape, lambda key=key: values[key])  # type: ignore[misc]
        for key, array in values.items()
    ]
    write_file(own / "model.blocks", entries)


def name_of(own: Path) -> str:
    bits = json.loads((own / "linnet-onnx.json").read_text())["blocks"][NAME]["bits"]
    return f"{NAME}.int{bits}"


@pytest.mark.parametrize("kind", ["", ".scales"])
def test_tensors_of_another_kind_are_told_so(kind: str, own: Path) -> None:
    name = name_of(own) + kind
    change_tensor(own, name, lambda values: values.astype(np.int16), DType.I16)
    with pytest.raises(CheckpointError, match=rf"{name} is i16"):
        load(own)


def test_scales_that_are_not_finite_are_named(own: Path) -> None:
    """Where values are read, as everywhere."""

    def damage(values: Array) -> Array:
        values[3, 1] = np.nan
        return values

    change_tensor(own, f"{name_of(own)}.scales", damage, DType.F32)
    with pytest.raises(CheckpointError, match=rf"{NAME}.* not finite"):
        linnet.load(str(own), backend="onnx")

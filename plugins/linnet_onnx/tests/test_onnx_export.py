"""The exporter: what is written, that ONNX Runtime runs it, and that Linnet reads it back."""

import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import linnet
from linnet.errors import CheckpointError, UnavailableError
from linnet.models.llama import Llama
from linnet.plugins.interfaces import LoadOptions
from linnet.reference.backend import ReferenceBackend
from linnet.runtime.load import bind as load
from linnet.spec.types import DType
from linnet.testing.backends import VARIANTS, bind, ints, tokens_of
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.testing.text import f0_text
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import StoredTensor
from linnet_onnx import blocks
from linnet_onnx.blocks import encode
from linnet_onnx.overflow import peaks

ENTRIES = {
    "forward",
    "extend",
    "extend_greedy",
    "extend_sample",
    "decode",
    "decode_greedy",
    "decode_sample",
}


def with_text(model: BoundModel) -> BoundModel:
    return replace(model, checkpoint=replace(model.checkpoint, text=f0_text()))


def scaled(factors: dict[str, float], **config: Any) -> BoundModel:
    """F0 with some tensors multiplied."""
    checkpoint = random_checkpoint(f0_config(**config), seed=0)
    tensors = dict(checkpoint.tensors)
    for name, factor in factors.items():
        values = tensors[name].read() * np.float32(factor)
        tensors[name] = StoredTensor(name, values.shape, DType.F32, lambda values=values: values)
    return Llama().bind(replace(checkpoint, tensors=tensors))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dialect", ["standard", "ort"])
def test_onnx_runtime_gives_the_model_s_logits(variant: str, dialect: str, tmp_path: Path) -> None:
    """Of every position by ``forward``, and of the last by prompt and step with their caches."""
    artifact = linnet.onnx.export(
        with_text(bind(variant)), tmp_path / "out", dialect=dialect, verify=True
    )
    assert artifact.verification is not None
    assert artifact.verification["distance"]["max_abs"] < 1e-4
    assert artifact.verification["texts"] == {"compared": 60, "differing": []}


@pytest.mark.parametrize(
    ("dtype", "dialect", "most"),
    [("f16", "standard", 1e-5), ("f16", "ort", 1e-5), ("int8", "ort", 1e-3), ("int4", "ort", 5e-2)],
)
def test_narrow_numbers_are_as_near_as_they_can_be(
    dtype: str, dialect: str, most: float, tmp_path: Path, f0: BoundModel
) -> None:
    options = {"dtype": dtype, "dialect": dialect, "verify": True}
    artifact = linnet.onnx.export(f0, tmp_path / "out", **options)
    assert artifact.verification is not None
    assert 0 < artifact.verification["distance"]["kl"] < most


@pytest.mark.parametrize("dialect", ["standard", "ort"])
def test_linnet_reads_the_folder_back_wherever_it_lies(dialect: str, tmp_path: Path) -> None:
    model = with_text(bind("tied"))
    linnet.onnx.export(model, tmp_path / "out", dialect=dialect, verify=True)
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    back = load(tmp_path / "elsewhere")
    for path, parameter in model.parameters.items():
        assert np.array_equal(back.parameters[path].read(), parameter.read()), path
    assert back.checkpoint.text.tokenizer == model.checkpoint.text.tokenizer
    for path in (tmp_path / "elsewhere").glob("*.onnx"):
        onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "elsewhere" / "forward.onnx")
    assert session.run(None, {"tokens": np.zeros((1, 3), np.int32)})[0].shape == (1, 3, 136)


def test_weights_are_there_once(tmp_path: Path) -> None:
    """Graphs hold none, point into one file, and a tied head is the embedding."""
    model = bind("tied")
    linnet.onnx.export(model, tmp_path / "out")
    written = {path.stem for path in (tmp_path / "out").glob("*.onnx")}
    assert written == ENTRIES
    stored, inside = set(), 0
    for path in (tmp_path / "out").glob("*.onnx"):
        graph = onnx.load(path, load_external_data=False).graph
        for tensor in graph.initializer:
            where = {entry.key: entry.value for entry in tensor.external_data}
            if where:
                assert where["location"] == "model.safetensors"
                stored.add((int(where["offset"]), int(where["length"])))
            elif path.stem == "forward":
                inside += len(tensor.raw_data)
    size = 4 * model.program.parameter_count
    assert sum(length for _, length in stored) == size
    assert inside < 2000
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < size + 10_000


def test_the_manifest_says_what_graphs_take(tmp_path: Path, f0: BoundModel) -> None:
    linnet.onnx.export(f0, tmp_path / "out", dialect="ort", max_seq="128")
    manifest = json.loads((tmp_path / "out" / "linnet-onnx.json").read_text())
    assert {k: manifest[k] for k in ("dialect", "dtype", "opset", "max_seq")} == {
        "dialect": "ort",
        "dtype": "f32",
        "opset": 23,
        "max_seq": 128,
    }
    inputs = {value["name"]: value for value in manifest["graphs"]["step"]["inputs"]}
    assert inputs["tokens"] == {"name": "tokens", "dtype": "i32", "shape": ["B", "P"]}
    key = inputs["past.model.layers.0.self_attn.cache.k"]
    assert key["shape"] == ["B", 2, "T", 16]


class Plain:
    """A reader of the exported step that has ONNX Runtime and the file, and nothing of Linnet's."""

    def __init__(self, path: Path, rows: int, context: int) -> None:
        self.session = onnxruntime.InferenceSession(path)
        self.outputs = [value.name for value in self.session.get_outputs()]
        sizes = {"B": rows, "T": context}
        self.state = {
            value.name: np.zeros([sizes.get(d, d) for d in value.shape], np.float32)
            for value in self.session.get_inputs()
            if value.name.startswith("past.")
        }

    def extend(self, tokens: Any, starts: list[int], lengths: list[int]) -> Any:
        where = {"starts": np.array(starts, np.int32), "lengths": np.array(lengths, np.int32)}
        given = self.session.run(None, {"tokens": tokens, **where, **self.state})
        outputs = dict(zip(self.outputs, given, strict=True))
        self.state = {name: outputs[f"present.{name[5:]}"] for name in self.state}
        return outputs["logits"]


@pytest.mark.parametrize(
    "calls",
    [
        [(5, [0], [3]), (7, [3], [2]), (1, [5], [1]), (9, [6], [9]), (4, [15], [3])],
        [(12, [0, 0, 0], [5, 7, 9]), (1, [5, 7, 9], [1, 1, 1]), (1, [6, 8, 10], [1, 1, 1])],
        [(9, [0, 0, 0], [9, 1, 4]), (1, [9, 1, 4], [1, 1, 1])],
    ],
)
def test_padding_of_any_width_changes_no_prompt(
    calls: list[tuple[int, list[int], list[int]]], tmp_path: Path, f0: BoundModel
) -> None:
    """Rows shorter than what they came in, in first and later prompts, and the steps after."""
    linnet.onnx.export(f0, tmp_path / "out", dialect="ort")
    rows, context = len(calls[0][1]), 48
    plain = Plain(tmp_path / "out" / "step.onnx", rows, context)
    options = LoadOptions(dtype="f32", rows=rows, max_seq=context)
    reference = ReferenceBackend().load(f0, options)
    for width, starts, lengths in calls:
        tokens = tokens_of(rows, width, seed=width)
        expected = reference.run(
            "extend",
            {"tokens": tokens, "rows": ints(*range(rows)), "starts": ints(*starts),
             "lengths": ints(*lengths)},
        )  # fmt: skip
        logits = plain.extend(tokens, starts, lengths)
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("starts", [[9, 9], [0, 5], [5, 0]])
def test_several_rows_of_several_tokens_do_not_go_on_together(
    starts: list[int], tmp_path: Path, f0: BoundModel
) -> None:
    """The kernel says so; rows that begin beside one that goes on would be wrong otherwise."""
    linnet.onnx.export(f0, tmp_path / "out", dialect="ort")
    plain = Plain(tmp_path / "out" / "step.onnx", 2, 48)
    plain.extend(tokens_of(2, 9), [0, 0], [9, 9])
    with pytest.raises(Exception, match="batch_size must be 1 when sequence_length > 1"):
        plain.extend(tokens_of(2, 9), starts, [9, 4] if starts[0] == 0 else [4, 9])


@pytest.mark.parametrize(("dialect", "dtype"), [("standard", "f32"), ("ort", "bf16")])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_damaged_weight_is_named(value: float, dialect: str, dtype: str, tmp_path: Path) -> None:
    """Without any engine being asked, and of a tensor that graphs read from the checkpoint."""
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = random_checkpoint(f0_config(), seed=0)
    values = checkpoint.tensors[name].read().copy()
    values[7, 3:5] = value
    damaged = StoredTensor(name, values.shape, DType.F32, lambda: values)
    model = Llama().bind(replace(checkpoint, tensors={**checkpoint.tensors, name: damaged}))
    message = rf"{re.escape(name)} has 2 of 3840 values that are not finite"
    with pytest.raises(CheckpointError, match=message):
        linnet.onnx.export(model, tmp_path / "out", dialect=dialect, dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_every_matrix_is_encoded_once_and_then_let_go(
    dtype: str, tmp_path: Path, f0: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 layers of 7 matrices and the head, counted as they are encoded."""
    made: list[weakref.ref[Any]] = []
    alive = []

    def counted(values: Any, bits: int) -> Any:
        alive.append(sum(ref() is not None for ref in made))
        parts = encode(values, bits)
        made.append(weakref.ref(parts[0]))
        return parts

    monkeypatch.setattr(blocks, "encode", counted)
    linnet.onnx.export(f0, tmp_path / "out", dtype=dtype, verify=True)
    assert len(made) == 3 * 7 + 1
    assert max(alive) <= 1
    files = [path.name for path in (tmp_path / "out").iterdir()]
    assert [name for name in files if name.endswith((".safetensors", ".blocks"))] == [
        "model.blocks"
    ]


def test_what_f16_cannot_hold_is_named(tmp_path: Path) -> None:
    """A feed-forward whose product reaches over 65504 on the probe prompt."""
    model = scaled({f"model.layers.1.mlp.{name}_proj.weight": 600.0 for name in ("gate", "up")})
    assert max(peaks(model).values()) > 65504
    with pytest.raises(UnavailableError, match=r"f16 cannot hold .*layers\.1\.mlp.* reaches"):
        linnet.onnx.export(model, tmp_path / "out", dtype="f16")
    assert not (tmp_path / "out").exists()
    linnet.onnx.export(model, tmp_path / "out", dtype="bf16")


def test_weights_that_f16_cannot_hold_are_named(tmp_path: Path) -> None:
    model = scaled({"model.norm.weight": 1e6})
    with pytest.raises((CheckpointError, UnavailableError), match=r"model\.norm\.weight"):
        linnet.onnx.export(model, tmp_path / "out", dtype="f16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "f8"}, "writes f32, f16, bf16, int8, int4, not 'f8'"),
        ({"dialect": "latin"}, "dialect is standard or ort, not 'latin'"),
        ({"dtype": "int4", "dialect": "standard"}, "ask for dialect=ort"),
        ({"max_seq": "0"}, "not a number from 1 to 512"),
        ({"fast": "yes"}, "no option fast"),
        ({"verify": "vllm"}, "can run onnxruntime"),
    ],
)
def test_what_there_is_not_is_refused(
    options: dict[str, str], message: str, tmp_path: Path, f0: BoundModel
) -> None:
    with pytest.raises(UnavailableError, match=message):
        linnet.onnx.export(f0, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    """Weights of 2.1 GB: past what one message of a graph could hold."""
    config = f0_config(
        vocab_size=132_000, hidden_size=2048, head_dim=64, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=64, num_hidden_layers=1,
    )  # fmt: skip
    checkpoint = random_checkpoint({**config, "num_hidden_layers": 1}, seed=0)
    model = Llama().bind(checkpoint)
    linnet.onnx.export(model, tmp_path / "out", dtype=str(DType.F32))
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2**31
    session = onnxruntime.InferenceSession(tmp_path / "out" / "forward.onnx")
    logits = session.run(None, {"tokens": np.zeros((1, 2), np.int32)})[0]
    assert np.isfinite(logits).all()

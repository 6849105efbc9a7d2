"""Exporting GGUF: what is written is read back to the bit, and what cannot be is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linnet
from linnet.errors import CheckpointError, UnavailableError
from linnet.models.llama import Llama
from linnet.runtime.load import bind
from linnet.runtime.tokenizer import Tokenizer
from linnet.spec.serialize import fingerprint
from linnet.spec.types import DType
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Checkpoint, StoredTensor
from linnet.weights.dtypes import cast, numpy_dtype
from linnet_gguf.container import read_container
from linnet_gguf.pretokenizers import PRE_TOKENIZERS

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "f0": {},
    "head_dim 8": {"head_dim": 8},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_theta": 10000.0, "rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "yarn": {"rope_scaling": YARN},
}


def f0(dtype: DType = DType.F32, **overrides: Any) -> BoundModel:
    """F0 in memory; matrices and vectors in ``dtype``."""
    checkpoint = random_checkpoint(f0_config(**overrides), seed=3)
    tensors = {
        name: StoredTensor(name, t.shape, dtype, lambda t=t: cast(t.read(), dtype, t.name))
        for name, t in checkpoint.tensors.items()
    }
    location = Path("f0")
    return Llama().bind(Checkpoint(location, "memory", checkpoint.config, tensors))


def values(model: BoundModel) -> dict[str, np.ndarray]:
    return {path: np.array(p.read()) for path, p in model.parameters.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_is_read_back(variant: str, tmp_path: Path) -> None:
    model = f0(**VARIANTS[variant])
    artifact = linnet.gguf.export(model, tmp_path / "out", dtype="f32")
    again = bind(artifact.folder)
    ours, theirs = values(model), values(again)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        assert np.array_equal(array, theirs[path]), path
    assert fingerprint(again.program) == fingerprint(model.program)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_the_dtype_of_the_matrices_is_kept_and_vectors_are_f32(
    dtype: DType, tmp_path: Path
) -> None:
    model = f0(dtype, attention_bias=True, mlp_bias=True)
    file = linnet.gguf.export(model, tmp_path / "out").files[0]
    assert file.name == f"model-{dtype.value}.gguf"
    for info in read_container(file).tensors.values():
        assert info.encoding.name == (dtype.value if len(info.shape) > 1 else "f32")
    again = bind(file)
    for path, array in values(model).items():
        read = again.parameters[path].read()
        assert np.array_equal(read.astype(numpy_dtype(dtype)), array), path
        assert np.array_equal(read.astype(np.float32), array.astype(np.float32)), path


@pytest.mark.parametrize("head_dim", [8, 16])
def test_rows_of_keys_are_counted_by_key_heads(head_dim: int, tmp_path: Path) -> None:
    """The order of 2 key heads beside 6 heads, written out by hand for head_dim 8."""
    model = f0(head_dim=head_dim)
    file = linnet.gguf.export(model, tmp_path / "out").files[0]
    container = read_container(file)
    info = container.tensors["blk.1.attn_k.weight"]
    rows = np.frombuffer(
        container.data, np.float32, info.nbytes // 4, info.offset
    ).reshape(info.shape)  # fmt: skip
    half = head_dim // 2
    order = [h * head_dim + half * s + i for h in range(2) for i in range(half) for s in range(2)]
    if head_dim == 8:
        assert order == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    expected = model.parameters["model.layers.1.self_attn.k_proj.weight"].read()[order]
    assert np.array_equal(rows, expected)


def test_the_llama3_table_is_a_tensor(tmp_path: Path) -> None:
    model = f0(**VARIANTS["llama3"])
    file = linnet.gguf.export(model, tmp_path / "out").files[0]
    container = read_container(file)
    info = container.tensors["rope_freqs.weight"]
    table = np.frombuffer(container.data, np.float32, 8, info.offset)
    np.testing.assert_allclose(table, [1, 1.293976, 7.667385, 8, 8, 8, 8, 8], rtol=1e-6)


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    file = linnet.gguf.export(f0(tie_word_embeddings=True), tmp_path / "out").files[0]
    tensors = read_container(file).tensors
    assert [name for name, info in tensors.items() if 136 in info.shape] == ["token_embd.weight"]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gguf_to_gguf_changes_no_byte(
    dtype: str, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    source = make_llama().write(tmp_path / "source.gguf")
    first = linnet.gguf.export(bind(source), tmp_path / "one", dtype=dtype, name="x").files[0]
    second = linnet.gguf.export(bind(first), tmp_path / "two", name="x").files[0]
    assert first.read_bytes() == second.read_bytes()
    ours, theirs = bind(source), bind(first)
    assert ours.checkpoint.text == theirs.checkpoint.text
    assert ours.checkpoint.notes == theirs.checkpoint.notes


def test_every_row_has_a_token(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    source = bind(make_llama().write(tmp_path / "source.gguf"))
    file = linnet.gguf.export(source, tmp_path / "out").files[0]
    metadata = read_container(file).metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, np.ndarray)
    assert len(tokens) == len(types) == 136
    assert (types == 5).sum() == 5 and tokens[131:] == [f"[PAD{i}]" for i in range(131, 136)]
    assert metadata["tokenizer.ggml.pre"] == "smollm"


PIECES = ["▁", *"abcdehlorw", "▁a", "ab", "bc", "abc", "he", "ll", "lo", "llo", "hello", "▁hello"]


def sentence_piece(make_llama: Callable[..., Any], order: list[int], **changes: Any) -> Any:
    """A small Llama with SentencePiece's tokens, of which the one at ``order[i]`` has rank i."""
    model = make_llama(layers=1, tied=True)
    model.tensors["token_embd.weight"] = model.tensors["token_embd.weight"].repeat(3, axis=0)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = np.zeros(len(tokens))
    scores[259 + np.array(order)] = -np.arange(len(PIECES), dtype=np.float32)
    model.metadata |= {
        "llama.vocab_size": 408,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.scores": scores.tolist(),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": None,
        **changes,
    }
    return model


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("shuffled", [False, True])
def test_scores_are_made_of_merges(
    shuffled: bool, prefix: bool, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    order = list(range(len(PIECES)))
    if shuffled:
        order = np.random.default_rng(0).permutation(len(PIECES)).tolist()
    changes = {"tokenizer.ggml.add_space_prefix": prefix, "tokenizer.ggml.add_bos_token": prefix}
    model = sentence_piece(make_llama, order, **changes)
    source = bind(model.write(tmp_path / "source.gguf"))
    artifact = linnet.gguf.export(source, tmp_path / "out")
    written = read_container(artifact.files[0]).metadata
    if not shuffled:
        scores = np.array(model.metadata["tokenizer.ggml.scores"], np.float32)
        stored = written["tokenizer.ggml.scores"]
        assert isinstance(stored, np.ndarray) and np.array_equal(stored[: len(scores)], scores)
    assert written["tokenizer.ggml.add_space_prefix"] is prefix
    assert any("every special token" in note for note in artifact.notes) is prefix
    assert bind(artifact.folder).checkpoint.text == source.checkpoint.text


def test_merges_that_no_scores_make_are_refused(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model = sentence_piece(make_llama, list(range(len(PIECES))))
    source = bind(model.write(tmp_path / "source.gguf"))
    tokenizer = json.loads(source.checkpoint.text.tokenizer or "")
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    text = replace(source.checkpoint.text, tokenizer=json.dumps(tokenizer))
    changed = replace(source, checkpoint=replace(source.checkpoint, text=text))
    with pytest.raises(UnavailableError, match="are not those of any SentencePiece scores"):
        linnet.gguf.export(changed, tmp_path / "out")


@pytest.mark.parametrize("name", [n for n in PRE_TOKENIZERS if not n.startswith("llama")])
def test_every_rule_is_written_by_its_name(
    name: str, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_llama(layers=1)
    model.metadata["tokenizer.ggml.pre"] = name
    artifact = linnet.gguf.export(bind(model.write(tmp_path / "m.gguf")), tmp_path / "out")
    assert read_container(artifact.files[0]).metadata["tokenizer.ggml.pre"] == name
    assert any("normalizer" in note for note in artifact.notes) is (name == "qwen2")


def test_a_rule_that_is_not_known_is_refused_unless_named(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    source = bind(make_llama(layers=1).write(tmp_path / "m.gguf"))
    tokenizer = json.loads(source.checkpoint.text.tokenizer or "")
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    text = replace(source.checkpoint.text, tokenizer=json.dumps(tokenizer))
    changed = replace(source, checkpoint=replace(source.checkpoint, text=text))
    with pytest.raises(UnavailableError, match="give it as pre_tokenizer"):
        linnet.gguf.export(changed, tmp_path / "out")
    artifact = linnet.gguf.export(changed, tmp_path / "out", pre_tokenizer="refact")
    assert read_container(artifact.files[0]).metadata["tokenizer.ggml.pre"] == "refact"


def test_more_ends_than_a_file_can_name_are_refused(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    source = bind(make_llama(layers=1).write(tmp_path / "m.gguf"))
    for ends, message in (([2, 0, 7], None), ([2, 0, 7, 9], r"4 ids \(0, 2, 7, 9\)")):
        text = replace(source.checkpoint.text, generation_config={"eos_token_id": ends})
        changed = replace(source, checkpoint=replace(source.checkpoint, text=text))
        if message is None:
            artifact = linnet.gguf.export(changed, tmp_path / "three")
            again = bind(artifact.folder).checkpoint
            assert set(Tokenizer(again.text, again.config).end_ids) == set(ends)
        else:
            with pytest.raises(UnavailableError, match=message):
                linnet.gguf.export(changed, tmp_path / "four")


def test_a_killed_export_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """Killed while the weights are written: what lies beside has another name, and is hidden."""
    code = (
        "import os, signal, sys; from pathlib import Path; sys.argv[1:]\n"
        "import linnet_gguf.writer as w; from linnet.testing.fixtures import *\n"
        "from linnet.models.llama import Llama; import linnet\n"
        "inner, calls = w.encode, []\n"
        "def encode(*a):\n"
        "    calls.append(a)\n"
        "    if len(calls) == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return inner(*a)\n"
        "w.encode = encode\n"
        "linnet.gguf.export(Llama().bind(random_checkpoint(f0_config(), 1)), sys.argv[1])\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert run.returncode == -9
    assert not (tmp_path / "out").exists()
    assert all(path.name.startswith(".out.") for path in tmp_path.iterdir())
    linnet.gguf.export(f0(), tmp_path / "out")  # and the name is free


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    artifact = linnet.gguf.export(f0(), tmp_path / "out")
    assert "no tokenizer.json" in artifact.notes[0]


def test_what_cannot_be_said_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"sliding_window": 32}, {}, "sliding window of 32"),
        ({}, {"dtype": "q8_0"}, "rows of 48 numbers, not a multiple of the 32"),
        ({}, {"dtype": "q9"}, "not 'q9'"),
        ({}, {"colour": "red"}, "no option colour"),
        ({"rope_scaling": {**YARN, "attention_factor": 2.0}}, {}, "by 2 here"),
    ]
    for overrides, options, message in cases:
        with pytest.raises(UnavailableError, match=message):
            linnet.gguf.export(f0(**overrides), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_values_that_f16_cannot_hold_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    model = f0()
    name = "model.layers.0.mlp.up_proj.weight"
    planted = model.parameters[name].read().copy()
    planted[1, 2] = 75000
    stored = StoredTensor(name, planted.shape, DType.F32, lambda: planted)
    tensors = {**model.checkpoint.tensors, name: stored}
    model = Llama().bind(Checkpoint(Path("f0"), "memory", model.checkpoint.config, tensors))
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight: 1 of 3840 values do not fit f16"):
        linnet.gguf.export(model, tmp_path / "out", dtype="f16")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        linnet.gguf.export(f0(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_quantized_matrices_are_near_and_their_outer_ones_nearer(tmp_path: Path) -> None:
    model = f0(hidden_size=64, intermediate_size=96)
    for dtype, bound in (("q8_0", 0.01), ("q4_0", 0.13), ("q4_1", 0.1)):
        file = linnet.gguf.export(model, tmp_path / dtype, dtype=dtype).files[0]
        kinds = {n: i.encoding.name for n, i in read_container(file).tensors.items()}
        assert kinds["blk.0.ffn_up.weight"] == dtype
        assert kinds["token_embd.weight"] == kinds["output.weight"] == "q8_0"
        assert kinds["output_norm.weight"] == "f32"
        again = values(bind(file))
        for path, array in values(model).items():
            scale = np.abs(array).max()
            assert np.abs(again[path] - array).max() <= bound * scale, (dtype, path)


def test_the_command_line(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    source = make_llama(layers=1).write(tmp_path / "source.gguf")
    command = [sys.executable, "-m", "linnet", "export", "gguf", str(source)]
    out = tmp_path / "out"
    run = subprocess.run(
        [*command, "-o", str(out), "--dtype", "bf16", "--set", "name=small", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    printed = json.loads(run.stdout)
    file = printed["files"][0]
    assert Path(file["path"]).stat().st_size == file["bytes"]
    assert read_container(Path(file["path"])).metadata["general.name"] == "small"
    again = subprocess.run([*command, "-o", str(out)], check=False, capture_output=True, text=True)
    assert again.returncode == 1 and "not an empty folder" in again.stderr
    wrong = subprocess.run(
        [*command, "-o", "x", "--set", "name"], check=False, capture_output=True, text=True
    )
    assert wrong.returncode == 2

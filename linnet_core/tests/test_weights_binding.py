"""Binding: one fitting tensor for each parameter, nothing unused, ties decided from the tensors."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from linnet.errors import BindingError
from linnet.models.llama import Llama
from linnet.spec.program import Parameter, Program
from linnet.spec.types import DType
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.weights.binding import BoundParameter, bind_parameters
from linnet.weights.checkpoint import Array, Checkpoint, StoredTensor
from linnet.weights.dtypes import dtype_of
from linnet.weights.ties import is_tied

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


def f0(**overrides: Any) -> tuple[Program, Checkpoint]:
    config = f0_config(**overrides)
    return Llama().program(config), random_checkpoint(config, 0)


def stored(name: str, values: Array) -> StoredTensor:
    return StoredTensor(name, values.shape, dtype_of(values.dtype), lambda: values)


def changed(checkpoint: Checkpoint, **tensors: Array | None) -> Checkpoint:
    """With some tensors replaced, added or (None) taken away."""
    after = dict(checkpoint.tensors)
    for name, values in tensors.items():
        after.pop(name, None)
        if values is not None:
            after[name] = stored(name, values)
    return replace(checkpoint, tensors=after)


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str]) -> Checkpoint:
    tensors = {rename(name): tensor for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors={n: replace(t, name=n) for n, t in tensors.items()})


def bound(program: Program, checkpoint: Checkpoint, **options: Any) -> dict[str, BoundParameter]:
    return bind_parameters(program, checkpoint, **options)


def refused(program: Program, checkpoint: Checkpoint, *messages: str, **options: Any) -> str:
    with pytest.raises(BindingError) as caught:
        bound(program, checkpoint, **options)
    for message in messages:
        assert message in str(caught.value)
    return str(caught.value)


def test_every_parameter_gets_its_tensor_as_stored() -> None:
    program, checkpoint = f0()
    half = checkpoint.tensors[Q].read().astype(np.float16)
    found = bound(program, changed(checkpoint, **{Q: half}))
    assert list(found) == [parameter.path for parameter in program.parameters]
    assert found[Q].dtype is DType.F16
    assert found[Q].read() is half
    for name, parameter in found.items():
        assert parameter.path == name
        assert parameter.shape == program.parameter(name).shape
        if name != Q:
            assert parameter.dtype is DType.F32
            assert parameter.read() is checkpoint.tensors[name].read()


def test_nothing_is_read_while_binding() -> None:
    program, checkpoint = f0()

    def unread() -> Array:
        raise AssertionError("binding reads no tensor")

    tensors = {name: replace(t, read=unread) for name, t in checkpoint.tensors.items()}
    bound(program, replace(checkpoint, tensors=tensors))


# C12: biases


def test_biases_of_all_seven_linears() -> None:
    program, checkpoint = f0(attention_bias=True, mlp_bias=True)
    biases = [name for name in bound(program, checkpoint) if name.endswith(".bias")]
    assert len(biases) == 7 * 3

    gone = "model.layers.2.mlp.down_proj.bias"
    refused(
        program,
        changed(checkpoint, **{gone: None}),
        f"1 missing: {gone}",
        "should attention_bias or mlp_bias be false?",
    )


def test_biases_that_the_config_leaves_out() -> None:
    _, checkpoint = f0(attention_bias=True, mlp_bias=True)
    program, _ = f0()
    refused(
        program,
        checkpoint,
        "21 not used: model.layers.0.mlp.down_proj.bias",
        "and 13 more",
        "should attention_bias or mlp_bias be true?",
    )


def test_a_stray_tensor() -> None:
    program, checkpoint = f0()
    stray = changed(checkpoint, **{"model.layers.3.mlp.extra": np.ones(3, np.float32)})
    refused(program, stray, "1 not used: model.layers.3.mlp.extra")
    bound(program, stray, ignore=[r"model\.layers\.\d+\.mlp\.extra"])
    refused(program, stray, "1 not used", ignore=[r"layers\.\d+\.mlp\.extra", r"model"])


def test_layers_beyond_those_of_the_config_and_short_of_them() -> None:
    three, checkpoint = f0()
    refused(f0(num_hidden_layers=2)[0], checkpoint, "9 not used: model.layers.2.input_layernorm")
    refused(f0(num_hidden_layers=4)[0], checkpoint, "9 missing: model.layers.3", "and 1 more")
    assert len(bound(three, checkpoint)) == 30


def test_everything_wrong_is_told_at_once() -> None:
    program, checkpoint = f0()
    wrong = changed(
        checkpoint,
        **{
            HEAD: None,
            "model.extra": np.ones(3, np.float32),
            Q: checkpoint.tensors[Q].read().T,
            EMBEDDING: np.zeros((144, 48), np.float32),
            "model.norm.weight": np.zeros(47, np.float32),
            Q.replace("q_proj", "k_proj"): np.zeros((31, 48), np.float32),
            "model.layers.0.input_layernorm.weight": np.zeros(48, np.int8),
        },
    )
    message = refused(
        program,
        wrong,
        f"1 missing: {HEAD}",
        "1 not used: model.extra",
        "5 of the wrong shape or type: ",
        f"{Q} is [48, 96], not [96, 48] (it is transposed)",
        f"{EMBEDDING} is [144, 48], not [136, 48] (is the vocabulary padded?",
        "model.norm.weight is [47], not [48]",
        "k_proj.weight is [31, 48], not [32, 48]",
        "model.layers.0.input_layernorm.weight is i8, not a float type",
    )
    assert message.count("padded") == 1


def test_a_file_of_another_family() -> None:
    program, checkpoint = f0()
    other = renamed(checkpoint, lambda name: "h." + name.replace("model.layers.", ""))
    refused(program, other, "no tensor of random-0", "it has h.0.input_layernorm.weight", EMBEDDING)
    refused(program, replace(checkpoint, tensors={}), "it has none")


def test_a_scalar_that_should_be_none() -> None:
    config = {"vocab_size": 136}
    program = Program("toy", (Parameter("scale", (), "scale"),), (), {}, {})
    checkpoint = changed(replace(f0()[1], config=config, tensors={}), scale=np.ones(1, np.float32))
    refused(program, checkpoint, "scale is [1], not []")


# Prefixes


def test_a_base_model_saved_without_its_prefix() -> None:
    program, checkpoint = f0()
    base = renamed(checkpoint, lambda name: name.removeprefix("model."))
    found = bound(program, base, prefixes=("", "model."))
    for name in checkpoint.tensors:
        assert found[name].read() is checkpoint.tensors[name].read()
    refused(program, base, "29 missing", "29 not used")


def test_a_name_with_and_without_its_prefix() -> None:
    program, checkpoint = f0()
    norm = np.ones(48, np.float32)
    both = changed(checkpoint, **{"norm.weight": norm})
    refused(program, both, "1 not used: norm.weight", prefixes=("", "model."))
    base = renamed(checkpoint, lambda name: name.removeprefix("model."))
    both = changed(base, **{"model.norm.weight": norm})
    refused(program, both, "1 not used: norm.weight", prefixes=("", "model."))


# Ties


def tie(checkpoint: Checkpoint, flag: bool | None) -> tuple[bool, str | None]:
    return is_tied(checkpoint, parameter=HEAD, tied_to=EMBEDDING, flag=flag)


def with_head(head: Array | None, embedding: Array | None, prefix: str = "model.") -> Checkpoint:
    found = {HEAD: head, f"{prefix}embed_tokens.weight": embedding}
    return changed(replace(f0()[1], tensors={}), **found)


VALUES = np.random.default_rng(0).standard_normal((136, 48)).astype(np.float32)
VALUES[0, 0], VALUES[1, 1] = np.nan, -0.0
OTHER = VALUES.copy()
OTHER[135, 47] += 1


def test_no_head_is_tied() -> None:
    assert tie(with_head(None, VALUES), True) == (True, None)
    tied, note = tie(with_head(None, VALUES), None)
    assert tied
    assert note == f"no {HEAD} and no tie_word_embeddings: taken as tied to {EMBEDDING}"
    with pytest.raises(BindingError, match=r"tie_word_embeddings is false.*no such tensor"):
        tie(with_head(None, VALUES), False)


def test_a_head_of_its_own_is_not() -> None:
    assert tie(with_head(OTHER, VALUES), False) == (False, None)
    assert tie(with_head(VALUES, VALUES), False) == (False, None)
    for head in (VALUES, OTHER):
        tied, note = tie(with_head(head, VALUES), None)
        assert not tied
        assert note == f"no tie_word_embeddings: untied, since the checkpoint has {HEAD}"


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_head_that_the_config_ties_must_be_equal(prefix: str) -> None:
    tied, note = tie(with_head(VALUES.copy(), VALUES, prefix), True)
    assert tied
    assert note == f"{HEAD} is stored as well as {EMBEDDING}, with equal values"
    zero = VALUES.copy()
    zero[1, 1] = 0.0
    for head in (OTHER, zero, VALUES[:-1], VALUES.view(np.int32)):
        with pytest.raises(BindingError, match="has both and they differ") as caught:
            tie(with_head(head, VALUES, prefix), True)
        shape = f"{dtype_of(head.dtype)}{list(head.shape)}"
        assert f"{HEAD} {shape} and {prefix}embed_tokens.weight f32[136, 48]" in str(caught.value)


def test_a_difference_in_the_last_value_of_a_large_head_is_seen() -> None:
    large = np.zeros((1 << 18, 20), np.float32)  # 20 MiB
    other = large.copy()
    other[-1, -1] = 1
    assert tie(with_head(large.copy(), large), True)[0]
    with pytest.raises(BindingError, match="they differ"):
        tie(with_head(other, large), True)


def test_a_head_without_the_embedding_it_is_tied_to() -> None:
    message = f"stores the values as {HEAD}; rename that tensor to {EMBEDDING}"
    with pytest.raises(BindingError, match=re.escape(message)):
        tie(with_head(VALUES, None), True)


def test_values_are_read_only_to_compare() -> None:
    def unread() -> Array:
        raise AssertionError("no reason to read")

    checkpoint = with_head(VALUES, VALUES)
    tensors = {name: replace(t, read=unread) for name, t in checkpoint.tensors.items()}
    for flag in (None, False):
        assert not tie(replace(checkpoint, tensors=tensors), flag)[0]


def test_a_tied_model_binds_with_and_without_a_stored_head() -> None:
    program, checkpoint = f0(tie_word_embeddings=True)
    assert HEAD not in checkpoint.tensors
    assert HEAD not in bound(program, checkpoint)
    copy = checkpoint.tensors[EMBEDDING].read().copy()
    model = Llama().bind(changed(checkpoint, **{HEAD: copy}))
    assert HEAD not in model.parameters
    assert any("with equal values" in note for note in model.notes)
    with pytest.raises(BindingError, match="they differ"):
        Llama().bind(changed(checkpoint, **{HEAD: copy + 1}))

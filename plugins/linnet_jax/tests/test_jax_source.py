"""The generated file: it stands on its own, and is JAX that others can use."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from linnet.plugins.interfaces import LoadOptions
from linnet.plugins.manager import plugin_manager
from linnet.spec import Program, from_json, to_json
from linnet.spec.ops import CALLS, PRIMITIVES
from linnet.spec.types import DType
from linnet.testing.backends import bind, tokens_of
from linnet.testing.fixtures import f0_config
from linnet.weights.safetensors import entries_of, write_file
from linnet_jax.backend import JaxBackend
from linnet_jax.expressions import CLAIMED, KNOWN
from linnet_jax.generated import load_module
from linnet_jax.source import generate

EVERYTHING = {
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 7,
}


def program_of(**changes: object) -> Program:
    manager = plugin_manager()
    return manager.implementation(manager.family("llama")).program(f0_config(**changes))


def write_weights(name: str, path: Path) -> None:
    write_file(path, entries_of(list(bind(name).checkpoint.tensors.values())))


def test_every_op_has_an_expression() -> None:
    named = {"parameter", "state_read", "state_write", *CALLS}
    assert set(PRIMITIVES) - named <= KNOWN
    assert CLAIMED <= KNOWN


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["f0", "everything"])
def test_the_same_program_gives_the_same_file(changes: dict[str, object], numerics: str) -> None:
    text = generate(program_of(**changes), numerics)
    assert generate(from_json(to_json(program_of(**changes))), numerics) == text
    assert max(map(len, text.splitlines())) <= 100


def test_what_users_read_has_the_names_of_the_checkpoint() -> None:
    text = JaxBackend().source(bind("biases"), LoadOptions())
    assert max(map(len, text.splitlines())) <= 100
    assert "qkv = linear(x, w.qkv_proj.weight, w.qkv_proj.bias)" in text
    assert "q = qkv[..., 0:96]" in text and "v = qkv[..., 128:160]" in text


def test_jax_opens_the_safetensors_that_linnet_writes(tmp_path: Path) -> None:
    write_weights("biases", tmp_path / "w.safetensors")
    arrays = load_file(tmp_path / "w.safetensors")
    for name, tensor in bind("biases").checkpoint.tensors.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), tensor.read())


@pytest.mark.parametrize("name", ["f0", "tied"])
def test_the_file_runs_with_jax_and_safetensors_alone(name: str, tmp_path: Path) -> None:
    """In a process that never imports Linnet; the usage in its docstring is what is run."""
    write_weights(name, tmp_path / "w.safetensors")
    source = JaxBackend().source(bind(name), LoadOptions())
    (tmp_path / "model.py").write_text(source)
    usage = [line.strip() for line in source.splitlines()[4:9]]
    assert usage[0].startswith("w = weights(") and usage[-1].startswith("token, state = decode")
    script = [
        "import sys, safetensors.flax",
        "from model import *",
        "path, tokens = 'w.safetensors', jnp.arange(1, 8, dtype=jnp.int32)[None]",
        *usage[:-1],
        "first = token",
        usage[-1],
        "logits = forward(w, jnp.concatenate((tokens, first[None]), axis=1))",
        "assert logits[0, -2].argmax() == first[0] and logits[0, -1].argmax() == token[0]",
        "assert not any(name.startswith('linnet') for name in sys.modules)",
    ]
    command = [sys.executable, "-c", "\n".join(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gradients_are_torch_s() -> None:
    """Of the mean of squared logits, with regard to every weight, on F0."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = bind("f0")
    arrays = {name: t.read() for name, t in model.checkpoint.tensors.items()}
    tokens = tokens_of(2, 11)

    config = transformers.LlamaConfig(**dict(model.checkpoint.config))
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in arrays.items()})
    (theirs(torch.from_numpy(tokens).long()).logits ** 2).mean().backward()
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}

    module = load_module(JaxBackend().source(model, LoadOptions()), "f0")

    def loss(arrays: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return (module.forward(module.weights(arrays), tokens) ** 2).mean()

    gradient = jax.jit(jax.grad(loss))(arrays, tokens)
    assert set(gradient) == set(expected)
    for name, array in gradient.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize("ynn", [True, False])
@pytest.mark.parametrize("count", [3, 30])
def test_gradients_in_bf16(count: int, ynn: bool) -> None:
    """Near f32's, though embeddings are gathered, and products of few tokens read, as bits."""
    arrays = {name: t.read() for name, t in bind("tied").checkpoint.tensors.items()}

    def gradient(dtype: DType) -> list[np.ndarray]:
        module = load_module(generate(bind("tied").program, dtype=dtype), "tied")
        vars(module)["YNN"] = ynn
        w = module.weights(arrays)
        found = jax.grad(lambda w: (module.forward(w, tokens_of(1, count)) ** 2).mean())(w)
        return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(found)]

    for wide, narrow in zip(gradient(DType.F32), gradient(DType.BF16), strict=True):
        assert np.abs(wide).max() > 0
        assert np.abs(wide - narrow).max() < 0.05 * np.abs(wide).max()


def test_forward_can_be_mapped() -> None:
    module = load_module(generate(bind("f0").program), "f0")
    w = module.weights({n: t.read() for n, t in bind("f0").checkpoint.tensors.items()})
    tokens = jnp.asarray(tokens_of(6, 9)).reshape(3, 2, 9)
    mapped = jax.vmap(module.forward, in_axes=(None, 0))(w, tokens)
    whole = module.forward(w, tokens.reshape(6, 9)).reshape(mapped.shape)
    np.testing.assert_allclose(mapped, whole, atol=1e-5)


def test_entries_are_pure() -> None:
    module = load_module(generate(bind("f0").program), "f0")
    w = module.weights({n: t.read() for n, t in bind("f0").checkpoint.tensors.items()})
    state = module.caches(1, 32)
    zero = jnp.zeros(1, jnp.int32)
    _, new = module.extend(w, state, jnp.asarray(tokens_of(1, 5)), zero, zero, zero + 5, end=5)
    assert all(not leaf.any() for leaf in jax.tree.leaves(state))
    assert all(leaf.any() for leaf in jax.tree.leaves(new))

"""Transformers as a backend: what it computes is what plain ``from_pretrained`` computes."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from linnet.cli.main import build_app
from linnet.errors import BindingError, CheckpointError, RequestError, UnavailableError
from linnet.models.llama import Llama
from linnet.plugins.interfaces import LoadOptions
from linnet.plugins.manager import plugin_manager
from linnet.spec.types import DType
from linnet.testing.backends import VARIANTS, BackendSuite
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import StoredTensor
from linnet.weights.folder import SafetensorsFormat
from linnet_hf import backend as hf
from linnet_hf.backend import TransformersBackend

F0 = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 136,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS = {
    "f0": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim_8": {"head_dim": 8},
    "llama3": {"rope_theta": 10000.0, "rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
}
DTYPE = "dtype" if hf.VERSION >= (4, 56) else "torch_dtype"


class TestTransformers(BackendSuite):
    """Linnet's reference agrees with Transformers on every model that both read alike."""

    backend = "transformers"
    # Transformers' Llama has no window; that it is refused is tested below.
    variants = tuple(name for name in VARIANTS if name != "window")


def save(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes) -> Path:
    """A model with every tensor random, norms about 1, as Transformers saves it."""
    model = LlamaForCausalLM(LlamaConfig(**deepcopy({**F0, **changes})))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name
            parameter.copy_(1 + 0.3 * values if norm else 0.2 * values)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def bind(folder: Path) -> BoundModel:
    return Llama().bind(SafetensorsFormat().open(folder))


def logits(folder: Path, tokens: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """What plain Transformers computes."""
    model = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **{DTYPE: dtype}
    ).eval()
    with torch.inference_mode():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def run(bound, tokens: np.ndarray, **options) -> np.ndarray:
    session = TransformersBackend().load(bound, LoadOptions(rows=3, max_seq=512, **options))
    result = session.run("forward", {"tokens": tokens})
    session.close()
    return result


TOKENS = np.random.default_rng(0).integers(0, 136, (3, 400), dtype=np.int32)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_f32_is_bit_equal(tmp_path: Path, changes) -> None:
    bound = bind(save(tmp_path, **changes))
    ours = run(bound, TOKENS)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, logits(tmp_path, TOKENS, torch.float32))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)],
)
def test_every_dtype_is_bit_equal(tmp_path: Path, stored, dtype, torch_dtype) -> None:
    bound = bind(save(tmp_path, dtype=stored))
    np.testing.assert_array_equal(
        run(bound, TOKENS, dtype=dtype), logits(tmp_path, TOKENS, torch_dtype)
    )


def test_shards(tmp_path: Path) -> None:
    bound = bind(save(tmp_path, shard="20KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    np.testing.assert_array_equal(run(bound, TOKENS), logits(tmp_path, TOKENS, torch.float32))


def test_weights_are_not_copied(tmp_path: Path) -> None:
    for stored, dtype in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        folder = tmp_path / dtype
        bound = bind(save(folder, dtype=stored))
        kept = {name: tensor.read() for name, tensor in bound.checkpoint.tensors.items()}
        tensors = {
            name: replace(bound.checkpoint.tensors[name], read=lambda array=array: array)
            for name, array in kept.items()
        }
        bound = replace(bound, checkpoint=replace(bound.checkpoint, tensors=tensors))
        session = TransformersBackend().load(bound, LoadOptions(dtype=dtype))
        for name, parameter in session._loaded.named_parameters():
            assert parameter.data_ptr() == kept[name].ctypes.data, name


def test_granted_is_read_off(tmp_path: Path) -> None:
    options = LoadOptions(dtype="bf16", rows=2, max_seq=64, threads=1)
    session = TransformersBackend().load(bind(save(tmp_path)), options)
    granted = session.granted
    assert (granted.backend, granted.mode, granted.dtype) == ("transformers", "eager", "bf16")
    assert (granted.device, granted.rows, granted.max_seq) == ("cpu", 2, 64)
    assert granted.threads == torch.get_num_threads() == 1
    assert "transformers " in granted.notes[0] and "torch " in granted.notes[0]
    assert session.source() is None


def with_tensors(bound, **changes):
    """The model with tensors of its checkpoint replaced, or left out where None."""
    tensors = {**bound.checkpoint.tensors, **{k.replace("__", "."): v for k, v in changes.items()}}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return replace(bound, checkpoint=replace(bound.checkpoint, tensors=kept))


def stored(name: str, array: np.ndarray) -> StoredTensor:
    return StoredTensor(name, array.shape, DType.F32, lambda: array)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    bound = bind(save(tmp_path))
    with pytest.raises(BindingError, match=r"missing keys: model\.norm\.weight"):
        run(with_tensors(bound, model__norm__weight=None), TOKENS)
    with pytest.raises(BindingError, match=r"missing keys: lm_head\.weight"):
        run(with_tensors(bound, lm_head__weight=None), TOKENS)
    extra = stored("model.extra", np.ones(3, np.float32))
    with pytest.raises(BindingError, match=r"unexpected keys: model\.extra"):
        run(with_tensors(bound, model__extra=extra), TOKENS)
    short = stored("model.norm.weight", np.ones(47, np.float32))
    with pytest.raises(BindingError, match=r"mismatched keys: .*model\.norm\.weight"):
        run(with_tensors(bound, model__norm__weight=short), TOKENS)


def test_old_rotary_tables_are_no_tensor_too_many(tmp_path: Path) -> None:
    bound = bind(save(tmp_path))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    table = stored(name, np.zeros(8, np.float32))
    old = with_tensors(bound, **{name.replace(".", "__"): table})
    np.testing.assert_array_equal(run(old, TOKENS), run(bound, TOKENS))


def test_values_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    bound = bind(save(tmp_path))
    huge = stored("model.norm.weight", np.full(48, 1e6, np.float32))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        run(with_tensors(bound, model__norm__weight=huge), TOKENS, dtype="f16")


def test_an_unstated_tie_is_what_binding_decided(tmp_path: Path) -> None:
    bound = bind(save(tmp_path, tie_word_embeddings=True))
    config = {k: v for k, v in bound.checkpoint.config.items() if k != "tie_word_embeddings"}
    for unstated in (config, config | {"tie_word_embeddings": None}):
        other = replace(bound, checkpoint=replace(bound.checkpoint, config=unstated))
        np.testing.assert_array_equal(run(other, TOKENS), run(bound, TOKENS))


def with_config(bound, **changes):
    config = {**bound.checkpoint.config, **changes}
    return replace(bound, checkpoint=replace(bound.checkpoint, config=config))


def test_what_transformers_would_ignore_is_refused(tmp_path: Path) -> None:
    bound = with_config(bind(save(tmp_path)), sliding_window=7)
    with pytest.raises(UnavailableError, match="sliding_window 7, which Transformers ignores"):
        run(bound, TOKENS)


def test_a_model_type_that_transformers_does_not_know(tmp_path: Path) -> None:
    bound = with_config(bind(save(tmp_path)), model_type="my_own")
    with pytest.raises(UnavailableError, match="does not know model_type 'my_own'"):
        run(bound, TOKENS)


def test_what_it_does_not_do(tmp_path: Path) -> None:
    bound = bind(save(tmp_path))
    with pytest.raises(UnavailableError, match="numerics is fast, not exact"):
        TransformersBackend().load(bound, LoadOptions(numerics="exact"))
    with pytest.raises(UnavailableError, match="cuda:99 was asked for"):
        TransformersBackend().load(bound, LoadOptions(device="cuda:99"))
    session = TransformersBackend().load(bound, LoadOptions(max_seq=512))
    with pytest.raises(RequestError, match="runs the entry forward, not decode"):
        session.run("decode", {})
    with pytest.raises(RequestError, match="tokens"):
        session.run("forward", {"tokens": TOKENS + 136})


def test_rope_as_releases_before_5_state_it() -> None:
    config = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    hf._state_rope_as_before_5(config)
    assert config == {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    config = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    hf._state_rope_as_before_5(config)
    assert config == {"rope_theta": 5e5}
    config = {"rope_theta": 1e4, "rope_scaling": LLAMA3}
    hf._state_rope_as_before_5(config)
    assert config == {"rope_theta": 1e4, "rope_scaling": LLAMA3}
    with pytest.raises(UnavailableError, match=r'pip install "transformers>=5"'):
        hf._state_rope_as_before_5({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}})


def test_it_is_the_first_choice_of_reference() -> None:
    backends = plugin_manager().backends.values()
    assert max(backends, key=lambda b: b.reference_priority).name == "transformers"


def test_check_takes_it_as_the_reference(tmp_path: Path) -> None:
    """NumPy is within 1e-4 of it on 400 tokens: whole, in chunks, and one by one."""
    save(tmp_path, rope_theta=10000.0, rope_scaling=LLAMA3)
    arguments = ["check", str(tmp_path), "--backend", "reference", "--bound", "1e-4", "--json"]
    result = CliRunner().invoke(build_app(), [*arguments, "--tokens", "400"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["reference"]["backend"] == "transformers" and told["passed_over"] == []
    assert [row["entry"] for row in told["rows"]] == ["forward", "extend", "decode"]
    assert all(row["distance"]["top1"] == 1.0 for row in told["rows"])


def test_check_passes_it_over_where_it_would_be_another_model(tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 7}))
    arguments = ["check", str(tmp_path), "--backend", "reference", "--tokens", "40", "--json"]
    told = json.loads(CliRunner().invoke(build_app(), arguments).stdout)
    assert told["reference"]["backend"] == "reference"
    assert "transformers: the config has sliding_window 7" in told["passed_over"][0]

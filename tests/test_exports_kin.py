"""GGUF of Llama's kin: what Transformers made is written, read back, and computed alike.

Their families bind them in Linnet; here the formats are held alone, so a model is bound by hand.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

import linnet
from linnet.distance import compare_logprobs
from linnet.errors import UnavailableError
from linnet.spec.program import Program
from linnet.testing.text import f0_text
from linnet.verification.engine import ask
from linnet.weights.binding import BoundModel, BoundParameter
from linnet.weights.folder import SafetensorsFormat
from linnet_gguf.export import LLAMACPP
from linnet_gguf.reader import GGUFFormat

SIZES = {
    "vocab_size": 136,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
KIN: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
        },
    ),
}


def made(name: str, folder: Path) -> Any:
    """A random model of Transformers, saved; its norms and biases are not what they begin as."""
    kind, settings = KIN[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    model_class = f"{kind.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path and kind == "Gemma3Text":
                parameter.copy_((torch.rand_like(parameter) - 0.5).bfloat16())
            elif "norm" in path:
                parameter.uniform_(0.7, 1.3)
            elif "bias" in path:
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def bound(folder: Path) -> BoundModel:
    checkpoint = SafetensorsFormat().open(folder)
    parameters = {
        name: BoundParameter(name, t.shape, t.dtype, t.read)
        for name, t in checkpoint.tensors.items()
    }
    program = cast(Program, None)  # no exporter of weights looks at it
    return BoundModel(program, checkpoint, parameters, vocab=136, max_positions=512, describe={})


@pytest.mark.parametrize("name", KIN)
def test_what_is_written_is_read_back_and_computed_alike(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "hf")
    source = bound(tmp_path / "hf")
    linnet.gguf.export(source, tmp_path / "gguf")
    again = GGUFFormat().open(tmp_path / "gguf")
    assert again.tensors.keys() == source.parameters.keys()
    for path, parameter in source.parameters.items():
        assert np.array_equal(again.tensors[path].read(), parameter.read()), path

    config = dict(again.config)
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    state = {path: torch.from_numpy(np.array(t.read())) for path, t in again.tensors.items()}
    loaded = classes[type(read)].from_pretrained(None, config=read, state_dict=state)
    tokens = torch.arange(300)[None] % 136
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", KIN)
def test_llamacpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    try:
        LLAMACPP.python()
    except UnavailableError as error:
        pytest.skip(str(error))
    model = made(name, tmp_path / "hf")
    source = bound(tmp_path / "hf")
    source = replace(source, checkpoint=replace(source.checkpoint, text=f0_text()))
    (file, *_) = linnet.gguf.export(source, tmp_path / "gguf").files
    tokens = np.random.default_rng(0).integers(4, 131, 200)
    answer = ask(LLAMACPP, file, tokens.tolist(), [], threads=2)
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert answer.listed is not None
    distance = compare_logprobs(logits, *answer.listed)
    assert distance.kl < 1e-5 and distance.top1 >= 0.99

"""Small GGUF files, written with the ``gguf`` library: 6 heads over 2 key heads, head_dim 16 beside
a hidden size of 48, 136 rows of embedding for a tokenizer of 131, random norms and biases.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, ROWS = 6, 2, 16, 48, 80, 136
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = """Ġ t|h e|i n|e r|Ġt he|Ġ a|o n|r e|a t|1 2|12 3|Ġ s|Ġ Ġ|ĠĠ ĠĠ|n d|Ġa nd|i s|o r|e s|
l l|' s|Ċ Ċ|w or|o u|l d|wor ld|Ġ world|Ġ w|H e|He ll|Hell o""".replace("\n", "").split("|")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def gpt2_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """131 tokens, their types, and merges: printable ASCII, space and newline."""
    tokens = [*CONTROL, "<think>", *map(chr, range(33, 127)), "Ġ", "Ċ"]
    types = [3, 3, 3, 4] + [1] * 96
    tokens += [merge.replace(" ", "") for merge in MERGES]
    return tokens, types + [1] * len(MERGES), MERGES


@dataclass
class Model:
    """What a file will hold: change it, then ``write``. Tensors are in GGUF's own order."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]
    types: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.metadata.get("general.architecture", "none"))
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in self.metadata.items():
            if key != "general.architecture" and value is not None:
                add[type(value)](key, value)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values, raw_dtype=self.types.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def draw(name: str, *shape: int) -> np.ndarray:
    """Values from a seed of the name's own; norms are 1 ± 0.3."""
    values = np.random.default_rng(list(name.encode())).standard_normal(shape)
    if "norm" in name:
        return np.float32(1 + 0.3 * np.tanh(values))
    return values.astype(np.float32)


def llama(layers: int = 3, *, biases: bool = False, tied: bool = False) -> Model:
    tokens, types, merges = gpt2_vocabulary()
    filler = range(len(tokens), ROWS)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.value_length": HEAD_DIM,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": ROWS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in filler)],
        "tokenizer.ggml.token_type": types + [5] * len(filler),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (ROWS, HIDDEN)}
    for layer in range(layers):
        at = f"blk.{layer}"
        linears = {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        for name, shape in linears.items():
            shapes[f"{at}.{name}.weight"] = shape
            if biases:
                shapes[f"{at}.{name}.bias"] = shape[:1]
        shapes[f"{at}.attn_norm.weight"] = shapes[f"{at}.ffn_norm.weight"] = (HIDDEN,)
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (ROWS, HIDDEN)
    return Model(metadata, {name: draw(name, *shape) for name, shape in shapes.items()})


@pytest.fixture
def make_llama() -> Callable[..., Model]:
    """Makes the parts of a small Llama; arguments as ``llama`` above."""
    return llama


@pytest.fixture
def open_model(tmp_path: Path) -> Callable[[Model], Any]:
    """Writes a model and opens the file."""
    from linnet_gguf.reader import GGUFFormat

    return lambda model: GGUFFormat().open(model.write(tmp_path / "model.gguf"))


@pytest.fixture
def open_with(
    make_llama: Callable[..., Model], open_model: Callable[[Model], Any]
) -> Callable[[Mapping[str, Any]], Any]:
    """Opens the small Llama with metadata changed; None takes a key away."""

    def open_(changes: Mapping[str, Any]) -> Any:
        model = make_llama(layers=1)
        model.metadata.update(changes)
        return open_model(model)

    return open_

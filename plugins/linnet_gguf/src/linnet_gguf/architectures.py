"""The GGUF architectures that are read and written, as a table.

Those here compute as Llama does: grouped-query attention with rotary positions, a gated
feed-forward layer, RMS norms before both. They differ in names, biases, further norms, windows, and
in which dimensions are rotated together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from linnet_gguf.names import LAYER

GEMMA3_LAYER = {
    **{name: theirs for name, theirs in LAYER.items() if name != "ffn_norm"},
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Architecture:
    """A value of ``general.architecture`` and the Transformers model that it is read as.

    ``interleaved`` architectures rotate neighbouring rows of a head together, so the rows of
    queries and keys are stored in another order. ``flags`` are the config's switches for biases,
    with the linears that have one then; linears in no flag have a bias if the model always does.
    """

    name: str
    model_type: str
    transformers_class: str
    interleaved: bool
    flags: Mapping[str, tuple[str, ...]]
    layer: Mapping[str, str]
    written_as: tuple[str, ...]
    """The values of ``model_type`` that are written as this architecture."""
    never: tuple[str, ...] = ()
    """Flags that llama.cpp does not have."""
    norms_from_one: bool = False
    """Whether Transformers stores norms as their difference from one, and GGUF as they are."""
    windowed: bool = False
    """Whether layers take turns at a sliding window, as in Gemma 3."""
    square: bool = False
    """Whether llama.cpp has the heads add up to the hidden size."""
    partial: bool = False
    """Whether ``rope.dimension_count`` may be less than a head has."""


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="llama",
            model_type="llama",
            transformers_class="LlamaForCausalLM",
            interleaved=True,
            flags={
                "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
                "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
            },
            layer=LAYER,
            written_as=("llama", "mistral"),
        ),
        Architecture(
            name="qwen2",
            model_type="qwen2",
            transformers_class="Qwen2ForCausalLM",
            interleaved=False,
            flags={},
            layer=LAYER,
            written_as=("qwen2",),
            square=True,
        ),
        Architecture(
            name="qwen3",
            model_type="qwen3",
            transformers_class="Qwen3ForCausalLM",
            interleaved=False,
            flags={"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")},
            layer=LAYER | QK_NORMS,
            written_as=("qwen3",),
            never=("attention_bias",),
        ),
        Architecture(
            name="gemma3",
            model_type="gemma3_text",
            transformers_class="Gemma3ForCausalLM",
            interleaved=False,
            flags={"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")},
            layer=GEMMA3_LAYER,
            written_as=("gemma3_text",),
            never=("attention_bias",),
            norms_from_one=True,
            windowed=True,
        ),
        Architecture(
            name="phi3",
            model_type="phi3",
            transformers_class="Phi3ForCausalLM",
            interleaved=False,
            flags={},
            layer=PHI3_LAYER,
            written_as=("phi3",),
            square=True,
            partial=True,
        ),
    )
}
"""By ``general.architecture``."""

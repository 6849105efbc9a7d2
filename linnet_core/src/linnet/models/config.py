"""Reading a Transformers config strictly: values are typed, and nothing is dropped in silence.

What a key's absence means to Transformers is what it means here; where that is a number that
the model was trained with, taking it is noted.
"""

import math
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, TypeVar

from linnet.errors import ConfigError

T = TypeVar("T")

HARMLESS = frozenset(
    {
        # what the file is about
        *("architectures", "model_type", "auto_map", "tokenizer_class", "is_llama_config"),
        *("dtype", "torch_dtype", "transformers_version", "transformers.js_config", "license"),
        # tokens, which the runtime reads
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
        # training
        *("initializer_range", "attention_dropout", "hidden_dropout", "hidden_dropout_prob"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "gradient_checkpointing"),
        # how Transformers runs it, with the same result
        *("use_cache", "pretraining_tp", "cache_implementation", "chunk_size_feed_forward"),
        *("output_attentions", "output_hidden_states", "return_dict", "torchscript"),
        # other tasks than text generation
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
    }
)
"""Keys that no logit depends on, whatever they say; so is one that starts with ``_``."""

CHANGING: Mapping[str, tuple[Any, ...]] = {
    # multipliers and caps
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    # attention
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_out_bias": (False,),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "cross_attention_layers": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "layer_types": (),
    "max_window_layers": (),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "qkv_bias": (False,),
    "sliding_window": (),
    "use_qk_norm": (False,),
    "use_bidirectional_attention": (False,),
    "use_sliding_window": (False,),
    "v_head_dim": (),
    # positions
    "local_rope_theta": (),
    "no_rope_layer_interval": (),
    "no_rope_layers": (),
    "partial_rotary_factor": (1,),
    "position_embedding_type": ("rope",),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "rotary_pct": (1,),
    # layers
    "block_configs": (),
    "hidden_activation": (),
    "lm_head_bias": (False,),
    "n_routed_experts": (0,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "quantization_config": (),
    "text_config": (),
    "use_bias": (False,),
    "use_parallel_residual": (False,),
    "vision_config": (),
}
"""Keys that change the arithmetic of the families that have them, with the values that do not."""


class Reader:
    """Reads values out of a ``config.json`` and remembers what was read and what was assumed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.read: set[str] = set()
        self.notes: list[str] = []

    def optional(self, name: str, type_: type[T]) -> T | None:
        """The value, or None where it is absent or null. An int will do for a float."""
        self.read.add(name)
        value = self.config.get(name)
        if value is None:
            return None
        if type_ is float and is_number(value):
            return float(value)  # type: ignore[return-value]
        if type_ is float or type(value) is not type_:
            raise ConfigError(f"config.json: {name} is {short(value)}, not {_NAMES[type_]}")
        return value

    def required(self, name: str, type_: type[T]) -> T:
        """The value; ConfigError where it is missing."""
        value = self.optional(name, type_)
        if value is None:
            raise ConfigError(f"config.json does not state {name}, which this family needs")
        return value

    def default(self, name: str, value: T) -> T:
        """The value, or what Transformers takes where it is absent, with a note."""
        given = self.optional(name, type(value))
        if given is not None:
            return given
        self.notes.append(
            f"config.json does not state {name}; assuming {value!r}, as Transformers does"
        )
        return value

    def size(self, name: str, default: int | None = None, *, at_most: int = 2**31 - 1) -> int:
        """A count from 1 on; required unless its absence means another."""
        value = self.optional(name, int)
        if value is None:
            value = self.required(name, int) if default is None else default
        if not 1 <= value <= at_most:
            raise ConfigError(
                f"config.json: {name} is {short(value)}, not between 1 and {at_most:,}"
            )
        return value

    def finish(self) -> None:
        """Account for the keys not read: refuse those that matter, note those not known."""
        unknown = []
        for name, value in self.config.items():
            if name in self.read or name in HARMLESS or name.startswith("_") or value is None:
                continue
            if name not in CHANGING:
                unknown.append(name)
            elif not any(value == neutral for neutral in CHANGING[name]):
                raise ConfigError(
                    f"config.json sets {name} to {short(value)}, which this family does not have: "
                    "its logits would be wrong"
                )
        if unknown:
            self.notes.append(f"config.json sets {', '.join(unknown)}, which nothing here reads")


_NAMES: Mapping[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a finite number",
    int: "an integer",
    list: "a list",
    str: "a string",
}


def is_number(value: Any) -> bool:
    """Whether it is an integer or float that an f64 holds, and not a boolean."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False

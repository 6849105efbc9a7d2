"""The typed program: what a model computes, as data.

A family is written in ``blocks`` and ``composites``; ``trace_decoder`` runs it once on symbolic
tensors and gives a checked ``Program``.
"""

from linnet.spec.blocks import (
    Block,
    Embedding,
    KVCache,
    LayerNorm,
    Linear,
    Param,
    RMSNorm,
    Span,
    State,
)
from linnet.spec.decoder import Decoder, trace_decoder
from linnet.spec.program import Function, Node, Parameter, Program, Value
from linnet.spec.serialize import fingerprint, from_json, to_json, to_text
from linnet.spec.trace import Tensor, apply, read
from linnet.spec.types import Dim, DType, TensorType

__all__ = [
    "Block",
    "DType",
    "Decoder",
    "Dim",
    "Embedding",
    "Function",
    "KVCache",
    "LayerNorm",
    "Linear",
    "Node",
    "Param",
    "Parameter",
    "Program",
    "RMSNorm",
    "Span",
    "State",
    "Tensor",
    "TensorType",
    "Value",
    "apply",
    "fingerprint",
    "from_json",
    "read",
    "to_json",
    "to_text",
    "trace_decoder",
]

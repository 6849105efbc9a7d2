"""Joining sibling linears keeps a program's meaning."""

import numpy as np
import pytest

from linnet.reference.interpreter import Interpreter
from linnet.spec.check import check
from linnet.spec.passes.join import join_linears
from linnet.spec.program import Program
from linnet.spec.serialize import from_json, to_json
from linnet.spec.types import DType
from linnet.testing.backends import VARIANTS, bind, tokens_of
from linnet.weights.binding import BoundModel


def logits(model: BoundModel, program: Program) -> np.ndarray:
    values = {path: parameter.read() for path, parameter in model.parameters.items()}
    for parameter in program.parameters:
        if parameter.parts:
            values[parameter.path] = np.concatenate([values[part] for part in parameter.parts])
        elif parameter.tied_to:
            values[parameter.path] = values[parameter.tied_to]
    (result,) = Interpreter(program, values, {}, DType.F32).run("forward", [tokens_of(2, 9)])
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_a_joined_program_computes_the_same(name: str) -> None:
    model = bind(name)
    joined = join_linears(model.program)
    check(joined)
    assert from_json(to_json(joined)) == joined
    plain = logits(model, model.program)
    scale = np.abs(plain).max()  # tied embeddings give logits of 50
    np.testing.assert_allclose(logits(model, joined), plain, atol=2e-6 * scale, rtol=0)


def test_what_is_joined() -> None:
    joined = join_linears(bind("biases").program)
    layer = [p for p in joined.parameters if p.path.startswith("model.layers.1.")]
    parts = {p.path: (p.shape, p.parts) for p in layer if p.parts}
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert parts == {
        f"{attention}.q_proj+k_proj+v_proj.weight": (
            (160, 48),
            tuple(f"{attention}.{n}_proj.weight" for n in "qkv"),
        ),
        f"{attention}.q_proj+k_proj+v_proj.bias": (
            (160,),
            tuple(f"{attention}.{n}_proj.bias" for n in "qkv"),
        ),
        f"{mlp}.gate_proj+up_proj.weight": (
            (160, 48),
            tuple(f"{mlp}.{n}_proj.weight" for n in ("gate", "up")),
        ),
        f"{mlp}.gate_proj+up_proj.bias": (
            (160,),
            tuple(f"{mlp}.{n}_proj.bias" for n in ("gate", "up")),
        ),
    }
    kept = {p.path for p in layer if not p.parts}
    assert not any(part in kept for _, parts_of in parts.values() for part in parts_of)

"""The graphs of the dialect ``standard``, run as the program's entries are, and what they hold."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from linnet.plugins.interfaces import LoadOptions
from linnet.reference.backend import ReferenceBackend
from linnet.spec.types import DType
from linnet.testing.backends import VARIANTS, bind, ints, tokens_of
from linnet.weights.binding import BoundModel
from linnet_onnx.graph import Graph
from linnet_onnx.models import Graphs
from linnet_onnx.runtime import start_session
from linnet_onnx.weights import Weights
from linnet_onnx.writer import write_entry

ROWS, CONTEXT = 4, 48


def proto_of(graph: Graph, name: str) -> Any:
    model = graph.model(name)
    for stored in graph.stored:
        model.graph.initializers[stored.name].const_value = ir.Tensor(stored.read())
    return ir.to_proto(model)


class Entries:
    """The graphs of a model with states that the test hands from one to the next."""

    def __init__(self, model: BoundModel) -> None:
        self.model, self.sessions = model, {}
        sizes = {"R": ROWS, "T": CONTEXT}
        self.state = {
            f"past.{s.path}": np.zeros([sizes.get(str(d), d) for d in s.type.shape], np.float32)
            for s in model.program.states
        }

    def run(self, entry: str, inputs: dict[str, Any]) -> Any:
        if entry not in self.sessions:
            weights = Weights(self.model.program, self.model.parameters, DType.F32)
            graph = write_entry(self.model.program, entry, weights, DType.F32)
            proto = proto_of(graph, entry)
            onnx.checker.check_model(proto, full_check=True)
            self.sessions[entry] = ort.InferenceSession(proto.SerializeToString())
        session = self.sessions[entry]
        known = {value.name for value in session.get_inputs()}
        feed = inputs | {name: a for name, a in self.state.items() if name in known}
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(names, session.run(None, feed), strict=True))
        for name in self.state:
            present = f"present.{name.removeprefix('past.')}"
            self.state[name] = outputs.get(present, self.state[name])
        return outputs[names[0]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_entry_is_the_reference_s(variant: str) -> None:
    """Prompts out of order, steps with an idle row, and every choice of a token."""
    model = bind(variant)
    tested = Entries(model)
    reference = ReferenceBackend().load(model, LoadOptions(dtype="f32", rows=ROWS, max_seq=CONTEXT))

    def both(entry: str, live: Any = slice(None), **inputs: Any) -> None:
        ours, theirs = tested.run(entry, inputs), reference.run(entry, inputs)
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours[live], theirs[live], atol=1e-4, rtol=0)

    both("forward", tokens=tokens_of(3, 7))
    where = {"rows": ints(3, 0, 1), "starts": ints(0, 0, 0), "lengths": ints(19, 1, 7)}
    both("extend", tokens=tokens_of(3, 19), **where)
    tokens = tokens_of(1, ROWS)[0]
    both("decode", [0, 1, 3], tokens=tokens, positions=ints(1, 7, -1, 19))
    both("decode_greedy", [0, 1, 3], tokens=tokens, positions=ints(2, 8, -1, 20))
    options = {
        "seeds": ints(1, 2, -3, 2**31 - 1),
        "temperature": np.array([0.0, 1.0, 1.5, 0.7], np.float32),
        "top_k": ints(0, 5, 0, 1000),
        "top_p": np.array([1.0, 1.0, 0.6, 0.9], np.float32),
        "min_p": np.array([0.0, 0.0, 0.0, 0.05], np.float32),
    }
    where = {"rows": ints(0, 1, 2, 3), "starts": ints(3, 9, 0, 21), "lengths": ints(9, 9, 9, 9)}
    both("extend_sample", tokens=tokens_of(ROWS, 9), **where, **options)
    both("decode_sample", tokens=tokens, positions=ints(12, 18, 9, 30), **options)


def test_a_cache_is_written_to_its_last_position() -> None:
    """What lies beyond a row's length is written nowhere, at the end of the cache as well."""
    model = bind("f0")
    tested = Entries(model)
    reference = ReferenceBackend().load(model, LoadOptions(dtype="f32", rows=ROWS, max_seq=CONTEXT))
    first = {"rows": ints(1), "starts": ints(0), "lengths": ints(CONTEXT - 2)}
    second = {"rows": ints(1), "starts": ints(CONTEXT - 2), "lengths": ints(2)}
    for tokens, where in (
        (tokens_of(1, CONTEXT - 2), first),
        (tokens_of(1, 9), second),  # seven of padding, which would pass the end
    ):
        ours = tested.run("extend", {"tokens": tokens, **where})
        theirs = reference.run("extend", {"tokens": tokens, **where})
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_sizes_are_free_and_tied_weights_are_there_once() -> None:
    model = bind("tied")
    weights = Weights(model.program, model.parameters, DType.F32)
    proto = proto_of(write_entry(model.program, "extend", weights, DType.F32), "extend")
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in proto.graph.input
    }
    assert shapes["tokens"] == ["B", "S"]
    assert shapes["past.model.layers.0.self_attn.cache.k"] == ["R", "T", 2, 16]
    stored = sum(len(t.raw_data) for t in proto.graph.initializer)
    assert stored <= 1.02 * 4 * model.program.parameter_count
    assert [opset.version for opset in proto.opset_import] == [21]
    assert {node.domain for node in proto.graph.node} == {""}


def test_the_step_reads_only_fused_attention(f0: BoundModel) -> None:
    step = Graphs(f0, "f32", "fast", 96).step()
    names = [node.op_type for node in step.graph.nodes]
    assert step.notes == ()
    assert names.count("GroupQueryAttention") == 3
    assert names.count("FusedMatMul") == 3 * 4 + 1
    assert names.count("SkipSimplifiedLayerNormalization") == 2 * 3
    assert not {"ScatterND", "Softmax"} & set(names)
    (cut,) = (node for node in step.graph.nodes if node.op_type == "Slice")
    assert cut.inputs[0] is step.graph.inputs[0]  # tokens, to the longest row


def test_exact_numerics_write_every_body_out(f0: BoundModel) -> None:
    graph = Graphs(f0, "f32", "exact", 96).step().graph
    assert {node.domain for node in graph.nodes} == {""}
    assert not {"Gemm", "Softmax", "Gelu", "Sigmoid"} & {node.op_type for node in graph.nodes}


def test_a_window_of_one_is_written_out() -> None:
    """The kernel reads it as none, so it is refused before the kernel is asked."""
    from linnet.models.llama import Llama
    from linnet.testing.fixtures import f0_config, random_checkpoint

    model = Llama().bind(random_checkpoint(f0_config(sliding_window=1), seed=0))
    step = Graphs(model, "f32", "fast", 32).step()
    assert step.notes == ("GroupQueryAttention reads a window of 1 as none",)
    session = start_session(step.graph, name="step", threads=1)
    tokens = tokens_of(1, 9)
    feed: dict[str, Any] = {"tokens": tokens, "starts": ints(0), "lengths": ints(9)}
    for value in session.get_inputs():
        if value.name.startswith("past."):
            shape = [{"B": 1, "T": 32}.get(d, d) for d in value.shape]
            feed[value.name] = np.zeros(shape, np.float32)
    logits = session.run(["logits"], feed)[0]
    reference = ReferenceBackend().load(model, LoadOptions(dtype="f32", max_seq=32))
    expected = reference.run("forward", {"tokens": tokens})[:, -1]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)

"""What the onnx backend grants and refuses, and what its session does with memory."""

import ctypes
import resource
import signal
import tempfile
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from linnet.errors import CheckpointError, UnavailableError
from linnet.models.llama import Llama
from linnet.plugins.benchmark import Job, Workload
from linnet.plugins.interfaces import Granted, LoadOptions
from linnet.reference.backend import ReferenceBackend
from linnet.spec.types import DType
from linnet.testing.backends import bind, ints, tokens_of
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet_onnx import tensorrt
from linnet_onnx.backend import OnnxBackend, provider_of
from linnet_onnx.bench import OnnxRuntime
from linnet_onnx.blocks import BLOCK, encode
from linnet_onnx.caches import Caches
from linnet_onnx.graph import Graph
from linnet_onnx.models import Graphs
from linnet_onnx.runtime import copied, start_session
from linnet_onnx.session import BINDINGS, OrtSession
from linnet_onnx.support import DTYPES

CUDA = "CUDAExecutionProvider" in ort.get_available_providers()
CONTEXT = 48
FLOAT = ir.DataType.FLOAT


def options(**changes: Any) -> LoadOptions:
    return replace(LoadOptions(dtype="f32", max_seq=CONTEXT, threads=2), **changes)


def load(model: BoundModel, **changes: Any) -> OrtSession:
    return OnnxBackend().load(model, options(**changes))


def extend(session: Any, tokens: Array, starts: Array) -> Any:
    batch, length = tokens.shape
    where = {
        "rows": np.arange(batch, dtype=np.int32),
        "starts": starts,
        "lengths": np.full(batch, length, np.int32),
    }
    return session.run("extend", {"tokens": tokens, **where})


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("name", ["f0", "biases", "head_dim_8", "window"])
def test_batches_of_queries_after_what_is_there(name: str, numerics: str) -> None:
    """1 and 3 rows, 1, 2 and 7 tokens, after 0, 1 and 33: the NumPy reference's logits."""
    model = bind(name)
    tested = load(model, rows=3, numerics=numerics)
    reference = ReferenceBackend().load(model, options(rows=3))
    for batch in (1, 3):
        for past in (0, 1, 33):
            for length in (1, 2, 7):
                if past:
                    before = tokens_of(batch, past, seed=past)
                    for session in (tested, reference):
                        extend(session, before, np.zeros(batch, np.int32))
                tokens = tokens_of(batch, length, seed=length)
                starts = np.full(batch, past, np.int32)
                ours, theirs = (extend(s, tokens, starts) for s in (tested, reference))
                np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_numerics_are_what_they_are_called(f0: BoundModel) -> None:
    assert load(f0).granted.numerics == "fast"
    assert load(f0, numerics="exact").granted.numerics == "exact"
    with pytest.raises(UnavailableError, match="fast or exact, not 'rough'"):
        load(f0, numerics="rough")


def test_caches_are_where_they_were_made(f0: BoundModel) -> None:
    """The runtime writes our caches: they are no copies."""
    session = load(f0)
    extend(session, tokens_of(1, 4), ints(0))
    (caches,) = session._caches._arrays
    assert all(np.abs(array[0, :, :4]).min() > 0 for array in caches.values())
    assert not any(array[0, :, 4:].any() for array in caches.values())


def test_the_file_of_weights_is_gone_when_they_are_loaded(
    f0: BoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session goes on reading what it maps."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = load(f0)
    assert not list(tmp_path.iterdir())
    assert extend(session, tokens_of(1, 9), ints(0)).any()


def test_a_folder_without_room_for_the_weights_is_named(
    f0: BoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UnavailableError, match=r"does not take one of .* bytes: .* TMPDIR"):
            load(f0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_a_step_makes_nothing_of_a_cache_s_size(f0: BoundModel) -> None:
    """Nor does its time or memory in this process grow: what is bound stays bound."""
    session = load(f0, max_seq=512)
    token = session.run("decode_greedy", {"tokens": ints(1), "positions": ints(0)})
    (caches,) = session._caches._arrays
    least = min(array.nbytes for array in caches.values())
    tracemalloc.start()
    for position in range(1, 9):
        token = session.run("decode_greedy", {"tokens": token, "positions": ints(position)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < least / 4
    assert len(session._bound) == 1


def test_the_graph_makes_nothing_of_a_cache_s_size(f0: BoundModel) -> None:
    """Every value that is as long as the cache is a cache, in its own memory, or a rotary table."""
    graph = Graphs(f0, "f32", "fast", 512).step().graph
    made = [
        (node.op_type, value)
        for node in graph.nodes
        for value in node.outputs
        if value.shape is not None and "T" in [str(d) for d in value.shape]
    ]
    assert {name for name, _ in made} == {"GroupQueryAttention"}
    assert all((value.name or "").startswith("present.") for _, value in made)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_what_a_cpu_has_no_products_in_is_refused(dtype: str, f0: BoundModel) -> None:
    """The table says so, and the runtime has no kernel: it would cast to f32 and back."""
    with pytest.raises(UnavailableError, match=f"not in '{dtype}': ONNX Runtime has no products"):
        load(f0, dtype=dtype)
    assert dtype not in DTYPES["cpu"]
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    name = {"f16": "tensor(float16)", "bf16": "tensor(bfloat16)"}[dtype]
    kernels = [
        kernel.type_constraints.get("T", [])
        for kernel in state.get_all_opkernel_def()
        if (kernel.op_name, kernel.provider) == ("FusedMatMul", "CPUExecutionProvider")
    ]
    assert kernels
    assert not any(name in types for types in kernels)


@pytest.mark.skipif(CUDA, reason="there is a CUDA provider")
def test_a_device_that_is_not_there_is_refused_with_what_there_is(f0: BoundModel) -> None:
    message = r"'cuda' is not available: .* has .*CPUExecutionProvider, not CUDAExecutionProvider"
    with pytest.raises(UnavailableError, match=message):
        load(f0, device="cuda")


@pytest.mark.skipif(not CUDA, reason="no CUDA provider: this ONNX Runtime is for CPUs")
def test_cuda(f0: BoundModel) -> None:
    session, reference = load(f0, device="cuda"), ReferenceBackend().load(f0, options())
    ours, theirs = (extend(s, tokens_of(1, 7), ints(0)) for s in (session, reference))
    np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=0)


def negation() -> Graph:
    graph = Graph(DType.F32)
    x = graph.input("x", ir.DataType.FLOAT, (1,))
    graph.output("y", graph.op("Neg", [x], ir.DataType.FLOAT, (1,)))
    return graph


def test_a_provider_that_is_not_there_is_an_error() -> None:
    """ONNX Runtime would go on with another, after a warning."""
    with pytest.raises(UnavailableError, match=r"asked for QNNEx.*; ONNX Runtime has .*CPUExecut"):
        start_session(negation(), name="g", threads=1, provider=("QNNExecutionProvider", {}))


AZURE = "AzureExecutionProvider"
"""A provider that wheels for CPUs have, too: it runs calls to a service, and no operator."""


@pytest.mark.skipif(AZURE not in ort.get_available_providers(), reason=f"no {AZURE}")
def test_nodes_that_a_provider_leaves_to_the_cpu_are_an_error() -> None:
    """ONNX Runtime would name the provider, and run every node on the CPU."""
    with pytest.raises(UnavailableError, match=r"AzureEx.* what it leaves to the CPU .* disabled"):
        start_session(negation(), name="g", threads=1, provider=(AZURE, {}))


def test_what_a_step_is_given_is_copied_into_values_of_the_device(f0: BoundModel) -> None:
    """One binding for all steps, with inputs in memory of their own: no array is read later."""
    session, reference = load(f0), ReferenceBackend().load(f0, options())
    for position, token in enumerate((5, 9, 9, 2)):
        step = {"tokens": ints(token), "positions": ints(position)}
        ours, theirs = (s.run("decode", step) for s in (session, reference))
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
        step["tokens"][0] = step["positions"][0] = 0
        (bound,) = session._bound.values()
        assert bound._inputs["tokens"].numpy().tolist() == [[token]]
        assert bound._inputs["starts"].numpy().tolist() == [position]


@pytest.mark.parametrize("kind", [FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_a_value_on_a_device_is_a_copy_of_the_same_type(kind: ir.DataType) -> None:
    """bf16 is no u16. The device is the CPU here, as if it were another: memory of its own."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3).astype(kind.numpy())
    value = copied(array, kind, "cpu:0")
    assert (value.element_type(), value.shape()) == (int(kind), [2, 3])
    there = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(value.data_ptr()))
    assert there.ctypes.data != array.ctypes.data
    np.testing.assert_array_equal(there, array.reshape(-1).view(np.uint8))


def test_caches_have_the_type_of_the_graph() -> None:
    caches = Caches({"past.k": ("tensor(bfloat16)", (3, 2, 8, 16))}, "cpu")
    past, present = caches.rows(1, 2)
    bf16 = int(ir.DataType.BFLOAT16)
    assert past["past.k"].element_type() == present["past.k"].element_type() == bf16
    assert past["past.k"].shape() == [1, 2, 8, 16]
    with pytest.raises(UnavailableError, match=r"rows is 3; on cuda .* caches of 1 row"):
        Caches({"past.k": ("tensor(float)", (3, 2, 8, 16))}, "cuda")


def test_bindings_do_not_grow_with_patterns_of_rows(f0: BoundModel) -> None:
    """28 runs of neighbours among 7 rows, twice: the same logits as the reference's all along."""
    rows = 7
    session, reference = load(f0, rows=rows), ReferenceBackend().load(f0, options(rows=rows))
    position = np.zeros(rows, np.int32)
    for start, stop in 2 * [(a, b) for a in range(rows) for b in range(a + 1, rows + 1)]:
        live = slice(start, stop)
        positions = np.full(rows, -1, np.int32)
        positions[live] = position[live]
        step = {"tokens": tokens_of(1, rows, seed=start)[0], "positions": positions}
        ours, theirs = (s.run("decode", step) for s in (session, reference))
        np.testing.assert_allclose(ours[live], theirs[live], atol=1e-4, rtol=0)
        position[live] += 1
    assert len(session._bound) == BINDINGS < 28
    logits = {id(bound.outputs["logits"].base) for bound in session._bound.values()}
    assert logits == {id(session._outputs["logits"])}


def test_a_damaged_weight_is_refused(f0: BoundModel) -> None:
    def damaged() -> Array:
        values = bound.read().copy()
        values[0] = np.nan
        return values

    path = "model.norm.weight"
    bound = f0.parameters[path]
    model = replace(f0, parameters={**f0.parameters, path: replace(bound, read=damaged)})
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight has 1 of 48 values that are not fin"
    ):
        load(model)


# --- weights in blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_hold_every_value_to_half_a_step(bits: int) -> None:
    """Rows that are no multiple of a block, rows of zeros, and outliers."""
    values = np.random.default_rng(0).standard_normal((5, 80)).astype(np.float32)
    values[1] = 0
    values[2, 7] = 100
    codes, scales, zeros = encode(values, bits)
    if bits == 4:
        assert zeros is not None
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(5, 3, BLOCK)
        zeros = np.stack([zeros & 15, zeros >> 4], -1).reshape(5, -1)[:, :3]
    else:
        zeros = np.full((5, 3), 128, np.uint8)
    decoded = (codes.astype(np.float32) - zeros[..., None]) * scales[..., None]
    off = np.abs(decoded.reshape(5, -1)[:, :80] - values)
    steps = np.repeat(scales, BLOCK, 1)[:, :80]
    assert (off <= steps * (0.51 if bits == 8 else 1.01)).all()
    assert not decoded.reshape(5, -1)[1].any()


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.4), ("int4", 2.5)])
def test_weights_in_blocks_are_near_the_model(dtype: str, most: float, f0: BoundModel) -> None:
    session = load(f0, dtype=dtype)
    assert session.granted.dtype == dtype
    reference = ReferenceBackend().load(f0, options())
    tokens = tokens_of(1, 20)
    expected = reference.run("forward", {"tokens": tokens})
    whole = session.run("forward", {"tokens": tokens})
    assert 0 < np.abs(whole - expected).max() < most
    last = extend(session, tokens, ints(0))
    np.testing.assert_allclose(last, whole[:, -1], atol=0.1 * most, rtol=0)


def test_the_head_is_int8_by_what_it_is() -> None:
    """The feed-forward's joined product has as many rows as the vocabulary here, and stays int4."""
    model = Llama().bind(random_checkpoint(f0_config(intermediate_size=68), seed=0))
    graph = Graphs(model, "int4", "fast", CONTEXT).step().graph
    bits = {
        (node.inputs[1].name, node.attributes["N"].as_int()): node.attributes["bits"].as_int()
        for node in graph.nodes
        if node.op_type == "MatMulNBits" and node.inputs[1] is not None
    }
    head = ("lm_head.weight.int8", model.vocab)
    assert bits.pop(head) == 8
    assert set(bits.values()) == {4}
    assert model.vocab in {rows for _, rows in bits}


def test_blocks_are_not_exact(f0: BoundModel) -> None:
    with pytest.raises(UnavailableError, match="weights in int8 are not exact"):
        load(f0, dtype="int8", numerics="exact")


# --- TensorRT -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device": "cpu"}, "mode 'tensorrt' and device 'cpu' disagree: TensorRT runs on cuda"),
        ({"dtype": "int4"}, "mode 'tensorrt' and dtype 'int4' disagree: .* ask for f32, f16, bf16"),
        ({"dtype": "int8", "device": "cuda"}, "mode 'tensorrt' and dtype 'int8' disagree"),
    ],
)
def test_tensorrt_is_not_granted_where_something_else_would_run(
    asked: dict[str, str], message: str, f0: BoundModel
) -> None:
    """Said before it is asked whether TensorRT is there."""
    with pytest.raises(UnavailableError, match=message):
        load(f0, mode="tensorrt", **{"dtype": None, **asked})


def test_an_engine_without_its_gpu_s_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where nvidia-smi is missing, and where it fails as it does without a driver."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"part of an engine's key.*No such file"):
        tensorrt.versions(0)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    smi.chmod(0o755)
    with pytest.raises(UnavailableError, match=r"--query-gpu=.* failed: no driver"):
        tensorrt.versions(0)


@pytest.mark.skipif(tensorrt.refusal() is None, reason="TensorRT is there")
def test_tensorrt_says_why_it_is_not_there(f0: BoundModel) -> None:
    with pytest.raises(UnavailableError, match=r"'tensorrt' is not available: .*linnet\[trt\]"):
        load(f0, mode="tensorrt")


def test_caches_on_two_sides_say_the_same(f0: BoundModel) -> None:
    """The step in ONNX's own operators, one side of the caches written from the other."""

    def provide(graph: Graph, caches: Mapping[str, Sequence[int]]) -> Any:
        assert {tuple(shape) for shape in caches.values()} == {(1, CONTEXT, 2, 16)}
        assert {node.domain for node in graph.nodes} <= {"", "com.microsoft"}
        return provider_of("cpu")

    granted = Granted("onnx", "tensorrt", "f32", "cpu", 1, CONTEXT, 2)
    session = OrtSession(f0, granted, provide, fused=False, turns=True)
    reference = ReferenceBackend().load(f0, options())
    start = 0
    for length in (7, 1, 1, 5, 1):
        tokens = tokens_of(1, length, seed=start)
        ours, theirs = (extend(s, tokens, ints(start)) for s in (session, reference))
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
        start += length
    for position in range(start, start + 4):
        step = {"tokens": ints(position), "positions": ints(position)}
        ours, theirs = (s.run("decode", step) for s in (session, reference))
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_an_engine_s_key_changes_with_all_that_decides_it() -> None:
    weights = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}
    changed = {**weights, "b": np.array([0, 0, 0, 1e-30], np.float32)}
    reshaped = {**weights, "a": np.ones((3, 2), np.float32)}
    narrow = {**weights, "b": np.zeros(4, np.float16)}
    facts = ["tensorrt 10.9", "1x1"]
    keys = [
        tensorrt.engine_key(graph, {name: partial(np.copy, a) for name, a in arrays.items()}, told)
        for graph, arrays, told in (
            (b"graph", weights, facts),
            (b"other", weights, facts),
            (b"graph", changed, facts),
            (b"graph", reshaped, facts),
            (b"graph", narrow, facts),
            (b"graph", weights, ["tensorrt 10.10", "1x1"]),
            (b"graph", weights, ["tensorrt 10.9", "1x2"]),
        )
    ]
    assert len(set(keys)) == len(keys)
    backwards = {name: partial(np.copy, a) for name, a in reversed(weights.items())}
    assert keys[0] == tensorrt.engine_key(b"graph", backwards, facts)


def test_profiles_reach_from_one_token_to_the_context() -> None:
    shapes = tensorrt.profiles({"past.k": [1, 48, 2, 16]}, 48)
    assert shapes["trt_profile_min_shapes"] == "tokens:1x1,starts:1,lengths:1,past.k:1x48x2x16"
    assert shapes["trt_profile_max_shapes"] == "tokens:1x48,starts:1,lengths:1,past.k:1x48x2x16"


def test_what_is_far_from_f32_is_refused_unless_told(
    f0: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held with weights in 4 bits, which are far, and in 8, which are near enough for a bound."""
    near, far = load(f0), load(f0, dtype="int4")
    assert "top-1 agreement 1.000" in tensorrt.hold(near, load(f0), f0.vocab)
    with pytest.raises(UnavailableError, match=r"int4 is off f32 by .* LINNET_TENSORRT_FAR=1"):
        tensorrt.hold(far, near, f0.vocab)
    monkeypatch.setenv(tensorrt.ALLOW, "1")
    assert "int4 is off f32" in tensorrt.hold(far, near, f0.vocab)


# --- benchmark methods ----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_the_bytes_of_a_step_with_weights_in_blocks(dtype: str, bits: int, f0: BoundModel) -> None:
    """Every block with its scale (and zero), the head in int8, the rest and the caches in f32."""
    workload = Workload(prompt_tokens=8, new_tokens=4)
    job = Job("linnet-ort", "f0", dtype, 2, workload, [], None, "")

    def encoded(rows: int, width: int, size: int) -> int:
        count = -(-width // BLOCK)
        zeros = -(-count // 2) if size == 4 else 0
        return rows * (count * (BLOCK * size // 8 + 4) + zeros)

    layer = encoded(160, 48, bits) + encoded(48, 96, bits)
    layer += encoded(160, 48, bits) + encoded(48, 80, bits) + 2 * 48 * 4
    caches = 3 * 2 * 2 * 16 * (8 + 2) * 4
    expected = 3 * layer + 48 * 4 + encoded(136, 48, 8) + caches
    assert OnnxRuntime().weight_bytes(f0, job) == expected

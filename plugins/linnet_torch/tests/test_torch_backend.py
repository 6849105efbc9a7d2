"""What the backend grants, refuses and chooses, and how weights become tensors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from linnet.errors import CheckpointError, RequestError, UnavailableError
from linnet.models.llama import Llama
from linnet.plugins.interfaces import LoadOptions
from linnet.spec.types import DType
from linnet.testing.backends import ints, tokens_of
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.weights.binding import BoundModel, BoundParameter
from linnet.weights.checkpoint import Array
from linnet_torch.backend import TorchBackend, default_dtype, find_device, find_dtype
from linnet_torch.session import TorchSession, plan
from linnet_torch.weights import DTYPES, fill

Load = Callable[..., TorchSession]
Bound = Callable[[str], BoundModel]
CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def parameter(values: Array, dtype: DType = DType.F32) -> BoundParameter:
    return BoundParameter("layer.weight", values.shape, dtype, lambda: values)


def read(stored: BoundParameter, dtype: DType) -> torch.Tensor:
    """The parameter as the backend has it."""
    place = torch.empty(stored.shape, dtype=DTYPES[dtype])
    fill(place, stored, dtype)
    return place


def stored_as(model: BoundModel, dtype: DType) -> BoundModel:
    parameters = {n: dataclasses.replace(p, dtype=dtype) for n, p in model.parameters.items()}
    return dataclasses.replace(model, parameters=parameters)


def test_probe() -> None:
    probe = TorchBackend().probe()
    assert probe.available
    assert probe.detail.startswith(f"PyTorch {torch.__version__}; cpu")


def test_granted_is_read_off_what_runs(load: Load) -> None:
    granted = load(dtype="bf16", rows=2, max_seq=33, threads=1).granted
    assert (granted.backend, granted.mode, granted.dtype) == ("torch", "eager", "bf16")
    assert (granted.device, granted.rows, granted.max_seq) == ("cpu", 2, 33)
    assert granted.threads == torch.get_num_threads() == 1
    assert load(threads=2).granted.threads == 2


def test_a_session_keeps_its_own_number_of_threads(load: Load) -> None:
    one, _ = load(threads=1), load(threads=2)
    assert torch.get_num_threads() == 2
    one.run("forward", {"tokens": tokens_of(1, 3)})
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "turbo"}, "has modes eager, inductor, cudagraphs, not 'turbo'"),
        ({"mode": "cudagraphs"}, "'cudagraphs' runs on CUDA, not on cpu"),
        ({"mode": "inductor", "numerics": "exact"}, "with fast numerics, not 'exact'"),
        ({"dtype": "f64"}, "computes in f32, bf16, f16, not in 'f64'"),
        ({"device": "tpu"}, "runs on cpu or cuda, not on 'tpu'"),
        ({"device": "cuda:x"}, "not on 'cuda:x'"),
    ],
)
def test_what_is_refused(load: Load, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        load(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda_is_an_error_with_pytorch_s_words() -> None:
    words = r"device 'cuda' is not available: .*(CUDA|NVIDIA).*; use device='cpu', or install"
    with pytest.raises(UnavailableError, match=words):
        find_device("cuda")


def test_dtypes_nobody_asked_for(bound: Bound) -> None:
    """f32 on the CPU; on CUDA what is stored, where PyTorch computes in it."""
    for stored in DType.F32, DType.BF16, DType.F16, DType.F64:
        assert default_dtype(stored_as(bound("f0"), stored), CPU)[0] is DType.F32
    session = TorchBackend().load(bound("f0"), LoadOptions(max_seq=8))
    assert session.granted.dtype == "f32"
    assert session.granted.notes == ("dtype f32: the default on the CPU",)


def test_no_longest_sequence_is_an_error(bound: Bound) -> None:
    model = dataclasses.replace(bound("f0"), max_positions=None)
    with pytest.raises(UnavailableError, match="give max_seq"):
        TorchBackend().load(model, LoadOptions())


def test_weights_lie_in_one_block_each_on_its_own_cache_line(load: Load) -> None:
    tensors = load("biases")._tensors
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())
    assert "model.layers.0.self_attn.q_proj+k_proj+v_proj.weight" in tensors


def test_joined_weights_are_their_parts(load: Load, bound: Bound) -> None:
    """Bit for bit, in the order that the product is cut in."""
    stored, joined = bound("biases").parameters, load("biases")._tensors
    at = "model.layers.1.self_attn"
    for local in ("weight", "bias"):
        paths = [f"{at}.{name}_proj.{local}" for name in "qkv"]
        parts = torch.cat([read(stored[path], DType.F32) for path in paths])
        assert torch.equal(joined[f"{at}.q_proj+k_proj+v_proj.{local}"], parts)


def test_tied_weights_are_one_tensor(load: Load) -> None:
    w = load("tied")._w
    assert w.lm_head.weight is w.model.embed_tokens.weight


def test_caches_are_empty_and_of_the_run_s_dtype(load: Load) -> None:
    state = load(dtype="f16", rows=3, max_seq=20)._state
    cache = state.model.layers[2].self_attn.cache
    assert len(state.model.layers) == 3
    assert cache.k.shape == cache.v.shape == (3, 21, 2, 16)
    assert cache.k.dtype is torch.float16
    assert not cache.k.any()


def test_weights_are_copies_of_a_file_s_memory() -> None:
    values = np.ones((2, 3), np.float32)
    values.setflags(write=False)
    tensor = read(parameter(values), DType.F32)
    values.setflags(write=True)
    values[:] = 7
    assert tensor.eq(1).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("target", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_casts_are_those_of_pytorch(source: Any, target: DType, transposed: bool) -> None:
    values = np.random.default_rng(0).standard_normal((7, 5)).astype(source)
    values = values.T if transposed else values
    kind = {np.float32: DType.F32, np.float16: DType.F16, ml_dtypes.bfloat16: DType.BF16}[source]
    tensor = read(parameter(values, kind), target)
    dtypes = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}
    wide = torch.from_numpy(values.astype(np.float32).copy())
    assert tensor.dtype is dtypes[target]
    assert torch.equal(tensor, wide.to(dtypes[target]))
    assert tensor.is_contiguous()


def test_weights_out_of_range_are_refused() -> None:
    values = np.array([[1.0, 70000.0]], np.float32)
    with pytest.raises(CheckpointError, match=r"layer\.weight: 1 of 2 values do not fit f16"):
        read(parameter(values), DType.F16)


def test_source_reads_no_weights(bound: Bound) -> None:
    def read() -> Array:
        raise AssertionError("a weight was read")

    model = bound("f0")
    parameters = {n: dataclasses.replace(p, read=read) for n, p in model.parameters.items()}
    model = dataclasses.replace(model, parameters=parameters)
    fast = TorchBackend().source(model, LoadOptions())
    exact = TorchBackend().source(model, LoadOptions(numerics="exact"))
    assert "F.scaled_dot_product_attention" in fast
    assert "F.scaled_dot_product_attention" not in exact


def test_a_session_s_source_is_the_backend_s(load: Load, bound: Bound) -> None:
    assert load().source() == TorchBackend().source(bound("f0"), LoadOptions())


def test_switches_of_the_process_are_put_back(load: Load) -> None:
    session = load()
    exact = session.run("forward", {"tokens": tokens_of(1, 50)})
    torch.set_float32_matmul_precision("medium")
    try:
        again = session.run("forward", {"tokens": tokens_of(1, 50)})
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    np.testing.assert_array_equal(exact, again)


def test_bad_inputs_and_a_closed_session(load: Load) -> None:
    session = load()
    with pytest.raises(RequestError, match="forward misses tokens"):
        session.run("forward", {})
    session.close()
    session.close()
    with pytest.raises(UnavailableError, match="closed; load the model again"):
        session.run("forward", {"tokens": tokens_of(1, 3)})


def test_tracebacks_show_the_generated_lines(load: Load) -> None:
    session = load()
    session._w.model.norm.weight = "not a tensor"
    with pytest.raises(TypeError) as error:
        session.run("forward", {"tokens": tokens_of(1, 3)})
    assert any("w.norm.weight" in str(entry) for entry in error.traceback)


class TestPlan:
    """What is known of a call before anything is on a device."""

    def extend(self, rows: Array, starts: Array, lengths: Array, size: int) -> Any:
        tokens = np.zeros((len(rows), size), np.int32)
        arrays, keywords, where = plan(
            {"tokens": tokens, "rows": rows, "starts": starts, "lengths": lengths}
        )
        return arrays["tokens"].shape[1], keywords["start"], keywords["end"], where

    def test_alike_rows_have_a_start(self) -> None:
        rows, starts = ints(1, 2), ints(5, 5)
        assert self.extend(rows, starts, ints(3, 3), 3) == (3, 5, 8, slice(1, 3))

    def test_columns_of_padding_are_dropped(self) -> None:
        assert self.extend(ints(0), ints(4), ints(3), 9) == (3, 4, 7, slice(0, 1))

    def test_ragged_rows_have_none(self) -> None:
        rows = ints(1, 2)
        assert self.extend(rows, ints(5, 5), ints(3, 2), 3) == (3, None, 8, slice(1, 3))
        assert self.extend(rows, ints(5, 90), ints(3, 3), 3) == (3, None, 93, slice(1, 3))

    def test_rows_apart_or_backwards_are_no_slice(self) -> None:
        for rows in (ints(0, 2), ints(1, 0)):
            assert self.extend(rows, ints(5, 5), ints(3, 3), 3)[3] is None

    @pytest.mark.parametrize(
        ("positions", "start", "end"),
        [((7, 7), 7, 8), ((7, 9), None, 10), ((7, -1), None, 8), ((-1, -1), None, 1)],
    )
    def test_decode(self, positions: tuple[int, ...], start: int | None, end: int) -> None:
        _, keywords, rows = plan({"tokens": ints(0, 0), "positions": ints(*positions)})
        assert (keywords, rows) == ({"start": start, "end": end}, None)


@needs_cuda
@pytest.mark.parametrize(("dtype", "most"), [("f32", 1e-3), ("bf16", 0.2), ("f16", 0.02)])
def test_cuda_is_near_the_cpu(load: Load, dtype: str, most: float) -> None:
    cpu, cuda = load(), load(dtype=dtype, device="cuda")
    assert cuda.granted.device == "cuda:0"
    tokens = tokens_of(2, 100)
    where = {"rows": ints(2, 0), "starts": ints(0, 0), "lengths": ints(100, 31)}
    step = {"tokens": ints(5, 6, 7, 8), "positions": ints(31, -1, 100, -1)}
    for entry, inputs in (
        ("forward", {"tokens": tokens}),
        ("extend", {"tokens": tokens, **where}),
        ("decode", step),
    ):
        ours, theirs = cuda.run(entry, inputs), cpu.run(entry, inputs)
        live = [0, 2] if entry == "decode" else slice(None)
        np.testing.assert_allclose(ours[live], theirs[live], atol=most, rtol=0)
        assert np.isfinite(ours).all()


@needs_cuda
def test_on_cuda_the_stored_dtype_is_chosen(bound: Bound) -> None:
    device = find_device("cuda")
    for stored, chosen in ((DType.F16, DType.F16), (DType.F64, DType.F32)):
        assert default_dtype(stored_as(bound("f0"), stored), device)[0] is chosen
    if torch.cuda.get_device_capability(device) >= (8, 0):
        assert default_dtype(stored_as(bound("f0"), DType.BF16), device)[0] is DType.BF16
    else:
        with pytest.raises(UnavailableError, match="bf16"):
            find_dtype("bf16", device)


@needs_cuda
def test_a_cuda_device_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="there are"):
        find_device("cuda:63")


def test_weights_that_are_not_finite_are_refused() -> None:
    checkpoint = random_checkpoint(f0_config(), 0)
    broken = np.array(checkpoint.tensors["model.norm.weight"].read())
    broken[3] = np.nan
    tensors = dict(checkpoint.tensors)
    tensors["model.norm.weight"] = dataclasses.replace(
        tensors["model.norm.weight"], read=lambda: broken
    )
    bound = Llama().bind(dataclasses.replace(checkpoint, tensors=tensors))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: 1 of 48 values are not"):
        TorchBackend().load(bound, LoadOptions(max_seq=32))


@pytest.mark.parametrize("device", ["", "0", "cpu:7", "cuda:x"])
def test_a_device_that_is_no_device_is_refused(device: str) -> None:
    bound = Llama().bind(random_checkpoint(f0_config(), 0))
    with pytest.raises(UnavailableError, match="runs on cpu or cuda"):
        TorchBackend().load(bound, LoadOptions(device=device, max_seq=32))

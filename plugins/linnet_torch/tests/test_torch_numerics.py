"""What the backend computes, against Transformers, the reference backend and itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from linnet.plugins.interfaces import LoadOptions, Session
from linnet.reference.backend import ReferenceBackend
from linnet.testing.backends import VARIANTS, ints, tokens_of, variant
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet_torch.session import TorchSession

Load = Callable[..., TorchSession]


def extend(session: Session, tokens: Array, row: int = 0, start: int = 0) -> Array:
    """One row's next logits ``[V]`` after writing ``tokens[1, S]``."""
    where = {"rows": ints(row), "starts": ints(start), "lengths": ints(tokens.shape[1])}
    return session.run("extend", {"tokens": tokens, **where})[0]


def transformers_logits(name: str, model: BoundModel, tokens: Array) -> Array:
    """Logits of Transformers, eager, f32, of the same tensors."""
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in variant(name).items() if k not in ("architectures", "model_type")}
    window = config.pop("sliding_window", None)
    if window is None:
        kind = transformers.LlamaConfig(**config, attn_implementation="eager")
        theirs = transformers.LlamaForCausalLM(kind)
    else:  # Mistral is Llama with a window
        config.pop("attention_bias"), config.pop("mlp_bias")
        kind = transformers.MistralConfig(
            **config, sliding_window=window, attn_implementation="eager"
        )
        theirs = transformers.MistralForCausalLM(kind)
    state = {n: torch.from_numpy(t.read().copy()) for n, t in model.checkpoint.tensors.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    with torch.inference_mode():
        return theirs.eval()(torch.from_numpy(tokens).long()).logits.float().numpy()


@pytest.mark.parametrize("name", VARIANTS)
def test_400_positions_are_those_of_transformers(
    name: str, load: Load, bound: Callable[[str], BoundModel]
) -> None:
    tokens = tokens_of(2, 400)
    theirs = transformers_logits(name, bound(name), tokens)
    session = load(name)
    ours = session.run("forward", {"tokens": tokens})
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    np.testing.assert_allclose(extend(session, tokens[:1]), theirs[0, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["f0", "window", "one_kv_head"])
def test_uneven_chunks_are_one_forward(name: str, load: Load) -> None:
    session, tokens = load(name), tokens_of(1, 400)
    whole = session.run("forward", {"tokens": tokens})[0]
    start = 0
    for size in (1, 7, 19, 2, 200, 171):
        logits = extend(session, tokens[:, start : start + size], row=3, start=start)
        start += size
        np.testing.assert_allclose(logits, whole[start - 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["f0", "window"])
def test_ragged_rows_are_as_if_alone(name: str, load: Load) -> None:
    """Rows of 1, 7 and 19 tokens, out of order, onto prefixes of different lengths."""
    session, tokens = load(name), tokens_of(3, 19)
    prefixes = [tokens_of(1, size, seed=size) for size in (90, 3, 40)]
    rows, lengths = ints(3, 0, 2), ints(1, 7, 19)
    for row, prefix in zip(rows, prefixes, strict=True):
        extend(session, prefix, row=int(row))
    where = {"rows": rows, "starts": ints(90, 3, 40), "lengths": lengths}
    logits = session.run("extend", {"tokens": tokens, **where})
    for b, prefix in enumerate(prefixes):
        alone = np.concatenate([prefix, tokens[b : b + 1, : lengths[b]]], axis=1)
        whole = session.run("forward", {"tokens": alone})[0, -1]
        np.testing.assert_allclose(logits[b], whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["f0", "window"])
@pytest.mark.parametrize("rows", [1, 4])
def test_decode_is_forward(name: str, rows: int, load: Load) -> None:
    """Step by step, rows in step or apart, to the last position."""
    session, tokens = load(name, rows=rows, max_seq=24), tokens_of(rows, 24)
    whole = session.run("forward", {"tokens": tokens})
    for apart in (0, 1):
        for step in range(24):
            positions = np.array([step - apart * r for r in range(rows)], np.int32)
            positions = np.where(positions < 0, -1, positions).astype(np.int32)
            following = tokens[np.arange(rows), np.maximum(positions, 0)]
            logits = session.run("decode", {"tokens": following, "positions": positions})
            assert np.isfinite(logits).all()
            for r in np.flatnonzero(positions >= 0):
                np.testing.assert_allclose(logits[r], whole[r, positions[r]], atol=1e-5, rtol=0)


def test_idle_rows_and_padding_write_nothing(load: Load) -> None:
    session = load()
    for row in range(4):
        extend(session, tokens_of(1, 30, seed=row), row=row)
    caches = [layer.self_attn.cache for layer in session._state.model.layers]
    kept = [tensor[:, :-1].clone() for cache in caches for tensor in (cache.k, cache.v)]

    def changed() -> set[tuple[int, int]]:
        """Cache rows and positions that are not as they were."""
        now = [tensor[:, :-1] for cache in caches for tensor in (cache.k, cache.v)]
        return {
            (int(row), int(position))
            for old, new in zip(kept, now, strict=True)
            for row, position in (old != new).any(dim=(2, 3)).nonzero()
        }

    inputs = {"tokens": ints(1, 2, 3, 4), "positions": ints(-1, 30, -7, -1)}
    assert np.isfinite(session.run("decode", inputs)).all()
    assert changed() == {(1, 30)}
    everyone_idle = {"tokens": ints(1, 2, 3, 4), "positions": ints(-1, -1, -1, -1)}
    assert np.isfinite(session.run("decode", everyone_idle)).all()
    assert changed() == {(1, 30)}
    where = {"rows": ints(3, 0), "starts": ints(446, 5), "lengths": ints(2, 5)}
    session.run("extend", {"tokens": tokens_of(2, 9), **where})
    assert changed() == {(1, 30), (3, 446), (3, 447), *((0, p) for p in range(5, 10))}


@pytest.mark.parametrize("name", ["f0", "biases", "window", "yarn_rope", "tied"])
def test_exact_numerics_are_the_fast_ones(name: str, load: Load) -> None:
    """With nothing claimed, primitives alone run the model."""
    tokens = tokens_of(2, 150)
    fast, exact = load(name), load(name, numerics="exact")
    assert exact.granted.numerics == "exact"
    assert "F." not in (exact.source() or "").split("def attention")[1]
    theirs = fast.run("forward", {"tokens": tokens})
    # Rounding is relative to the largest terms: the tied head's logits reach 50.
    within = 1e-5 * max(1.0, float(np.abs(theirs).max()) / 10)
    np.testing.assert_allclose(
        exact.run("forward", {"tokens": tokens}), theirs, atol=within, rtol=0
    )
    inputs = {
        "tokens": tokens,
        "rows": ints(2, 0),
        "starts": ints(0, 0),
        "lengths": ints(150, 30),
    }
    step = {"tokens": ints(5, 6, 7, 8), "positions": ints(30, -1, 150, -1)}
    for entry, given in (("extend", inputs), ("decode", step)):
        ours, theirs = exact.run(entry, given), fast.run(entry, given)
        live = slice(None) if entry == "extend" else [0, 2]
        np.testing.assert_allclose(ours[live], theirs[live], atol=within, rtol=0)
        assert np.isfinite(ours).all()


def options(rows: int, **changes: Any) -> dict[str, Array]:
    """Sampling options, the same for every row but for the seed."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    return {
        "seeds": np.arange(rows, dtype=np.int32) * 7919 - 5,
        **{name: np.full(rows, given[name], kind) for name, kind in kinds.items()},
    }


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_sampled_tokens_are_those_of_the_reference(
    changes: dict[str, Any], numerics: str, load: Load, bound: Callable[[str], BoundModel]
) -> None:
    session = load(numerics=numerics, max_seq=64)
    reference = ReferenceBackend().load(bound("f0"), LoadOptions(rows=4, max_seq=64))
    prompts = tokens_of(4, 9)
    where = {"rows": ints(0, 1, 2, 3), "starts": ints(0, 0, 0, 0), "lengths": ints(9, 1, 7, 9)}
    inputs = {"tokens": prompts, **where, **options(4, **changes)}
    ours, theirs = (s.run("extend_sample", inputs) for s in (session, reference))
    positions = where["lengths"]
    for _ in range(8):
        np.testing.assert_array_equal(ours, theirs)
        inputs = {"tokens": ours, "positions": positions, **options(4, **changes)}
        ours, theirs = (s.run("decode_sample", inputs) for s in (session, reference))
        positions = positions + 1


def test_sampling_does_not_depend_on_the_batch(load: Load) -> None:
    """A request alone, in any row, and among others: the same tokens."""
    runs = []
    for rows, row in ((1, 0), (4, 0), (4, 3)):
        session = load(rows=rows, max_seq=64)
        prompts = tokens_of(rows, 9, seed=row)
        prompts[row] = tokens_of(1, 9, seed=99)[0]
        where = {
            "rows": np.arange(rows, dtype=np.int32),
            "starts": np.zeros(rows, np.int32),
            "lengths": np.array([9 if r == row else 1 + r for r in range(rows)], np.int32),
        }
        choice = options(rows, top_p=0.9)
        choice["seeds"][row] = 42
        tokens = session.run("extend_sample", {"tokens": prompts, **where, **choice})
        chosen, positions = [int(tokens[row])], where["lengths"]
        for _ in range(20):
            step = {"tokens": tokens, "positions": positions, **choice}
            tokens, positions = session.run("decode_sample", step), positions + 1
            chosen.append(int(tokens[row]))
        runs.append(chosen)
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) > 5


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.15), ("f16", 0.02)])
def test_narrow_dtypes_stay_near_f32(dtype: str, most: float, numerics: str, load: Load) -> None:
    tokens = tokens_of(1, 100)
    wide, narrow = load(), load(dtype=dtype, numerics=numerics)
    assert narrow.granted.dtype == dtype
    ours, theirs = (s.run("forward", {"tokens": tokens}) for s in (narrow, wide))
    assert ours.dtype == np.float32
    assert 0 < np.abs(ours - theirs).max() < most
    ours, theirs = (extend(s, tokens) for s in (narrow, wide))
    assert np.abs(ours - theirs).max() < most
    step = {"tokens": ints(5, 0, 0, 0), "positions": ints(100, -1, -1, -1)}
    ours, theirs = (s.run("decode", step) for s in (narrow, wide))
    assert np.abs(ours[0] - theirs[0]).max() < most
    assert np.isfinite(ours).all()


def test_a_row_used_again_is_as_new(load: Load) -> None:
    session = load()
    extend(session, tokens_of(1, 300), row=1)
    for size in (40, 5, 1):
        tokens = tokens_of(1, size, seed=size)
        logits = extend(session, tokens, row=1)
        whole = session.run("forward", {"tokens": tokens})[0, -1]
        np.testing.assert_allclose(logits, whole, atol=1e-5, rtol=0)


def test_results_belong_to_the_caller(load: Load) -> None:
    session = load()
    first = session.run("forward", {"tokens": tokens_of(1, 5)})
    kept = first.copy()
    session.run("forward", {"tokens": tokens_of(1, 5, seed=1)})
    np.testing.assert_array_equal(first, kept)
    first[:] = 0  # and may be written


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_what_overflowed_in_a_row_does_not_reach_its_next_request(mode: str, load: Load) -> None:
    """In f16, an infinity left in a cache row; ragged rows make the next prompts masked."""
    session = load(mode=mode, dtype="f16", rows=2, max_seq=24)
    for layer in session._state.model.layers:
        layer.self_attn.cache.k.fill_(torch.inf)
        layer.self_attn.cache.v.fill_(torch.nan)
    where = {"rows": ints(0, 1), "starts": ints(0, 0), "lengths": ints(9, 4)}
    assert np.isfinite(session.run("extend", {"tokens": tokens_of(2, 9), **where})).all()
    step = {"tokens": ints(1, 2), "positions": ints(9, 4)}
    assert np.isfinite(session.run("decode", step)).all()

"""What the backend promises beside right answers: few shapes, donation, one copy, precision."""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import LoadOptions
from linnet.testing.backends import bind, ints, tokens_of
from linnet_jax import helpers
from linnet_jax.backend import MODES, JaxBackend
from linnet_jax.buckets import next_power, next_size, pad
from linnet_jax.session import JaxSession

Load = Callable[..., JaxSession]


@pytest.fixture
def load() -> Iterator[Load]:
    sessions = []

    def start(name: str = "f0", **options: Any) -> JaxSession:
        given = {"rows": 2, "max_seq": 448, "threads": 2} | options
        sessions.append(JaxBackend().load(bind(name), LoadOptions(**given)))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()


def prompt(session: JaxSession, length: int, entry: str = "extend_greedy") -> np.ndarray:
    where = {"rows": ints(1), "starts": ints(0), "lengths": ints(length)}
    return session.run(entry, {"tokens": tokens_of(1, length), **where})


@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_lengths_compile_nothing_after_warm_up(mode: str, load: Load) -> None:
    session = load(mode=mode)
    sizes = sorted({next_size(length, 448) for length in range(1, 448)})
    for size in sizes:
        prompt(session, size)
    for last in (10, 300):
        session.run("decode_greedy", {"tokens": ints(1, 2), "positions": ints(-1, last)})
    known = session.compiled
    assert known == len(sizes) + 2
    lengths = np.random.default_rng(0).integers(1, 447, 100)
    with jax.log_compiles(True):
        for length in [317, *map(int, lengths)]:
            token = prompt(session, length)
            step = {"tokens": ints(0, int(token[0])), "positions": ints(-1, length)}
            session.run("decode_greedy", step)
    assert session.compiled == known


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_caches_are_donated(mode: str, dtype: str, load: Load) -> None:
    """The old arrays are gone, their memory is the new ones', and nothing warns."""
    session = load(mode=mode, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompt(session, 20)
        before = session._states
        places = [state.unsafe_buffer_pointer() for state in before]
        session.run("decode_greedy", {"tokens": ints(1, 2), "positions": ints(-1, 20)})
    assert all(state.is_deleted() for state in before)
    assert [state.unsafe_buffer_pointer() for state in session._states] == places
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(before[0])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_copies_no_cache(mode: str, dtype: str, load: Load) -> None:
    """In what XLA compiled, whatever has a cache's whole shape is that cache, updated in place."""
    session = load(mode=mode, dtype=dtype, rows=2, max_seq=448)
    prompt(session, 300)
    session.run("decode_greedy", {"tokens": ints(1, 2), "positions": ints(-1, 300)})
    step = next(s for key, s in session._steps.items() if key[0] == "decode_greedy")
    entry = step.executable.hlo_modules()[0].to_string().rpartition("ENTRY ")[2]
    shape = ",".join(map(str, session._states[0].shape))
    whole = [line for line in entry.splitlines() if re.search(rf"= \w+\[{shape}\]", line)]
    made = [line for line in whole if "parameter(" not in line]
    assert len(made) == 2 * len(session._states)  # a slice for each row
    assert all("dynamic-update-slice" in line for line in made)


@pytest.mark.parametrize("ynn", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [1, 2, 37, 74, 288, 36, 1536, 1025])
def test_products_of_one_row(width: int, dtype: Any, ynn: bool, monkeypatch: Any) -> None:
    """Of any width, against f64: the sums lose no more than f32 sums may."""
    monkeypatch.setattr(helpers, "YNN", ynn)
    random = np.random.default_rng(width)
    row = random.standard_normal(width, np.float32)
    weight = jnp.asarray(random.standard_normal((35, width), np.float32), dtype)
    found = jax.jit(lambda x, y: helpers.total(helpers.products(x, y)))(row, weight)
    exact = np.asarray(weight, np.float64) @ row
    room = np.abs(np.asarray(weight, np.float64)) @ np.abs(row)
    assert (np.abs(found - exact) <= 1e-6 * room).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_weight_is_there_once(mode: str, load: Load) -> None:
    session = load("tied", mode=mode)
    stored = [p for p in bind("tied").program.parameters if p.tied_to is None]
    held = sum(array.size for array in session._weights or [])
    assert held == sum(math.prod(parameter.shape) for parameter in stored)
    assert session.run("forward", {"tokens": tokens_of(1, 5)}).shape == (1, 5, 136)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("mode", MODES)
def test_narrow_dtypes(mode: str, dtype: str, load: Load) -> None:
    """Near f32 at every kind of call: a prompt, one row, and more rows than are summed."""
    wide, narrow = load(mode=mode, rows=8), load(mode=mode, dtype=dtype, rows=8)
    assert narrow.granted.dtype == dtype
    bound = 0.15 if dtype == "bf16" else 0.02
    for length in (1, 40):
        a, b = (prompt(session, length, "extend") for session in (wide, narrow))
        assert b.dtype == np.float32
        assert np.abs(a - b).max() < bound * np.abs(a).max()
    step = {"tokens": np.arange(8, dtype=np.int32), "positions": ints(0, 40, *[-1] * 6)}
    a, b = (session.run("decode", step) for session in (wide, narrow))
    assert np.abs(a - b)[:2].max() < bound * np.abs(a).max()


@pytest.mark.parametrize("mode", MODES)
def test_what_overflowed_in_f16_is_not_seen_by_the_next(mode: str, load: Load) -> None:
    session = load(mode=mode, dtype="f16")
    clean = prompt(session, 5, "extend")
    poison = [np.full(s.shape, np.inf, np.float16) for s in session._states]
    session._states = [jax.device_put(array.view("u2")) for array in poison]  # kept as bits
    np.testing.assert_array_equal(prompt(session, 5, "extend"), clean)


def test_notes_say_what_of_memory_and_threads_holds(load: Load) -> None:
    session = load()
    assert any("XLA_PYTHON_CLIENT_PREALLOCATE" in note for note in session.granted.notes)
    other = load(threads=session.granted.threads + 1)
    assert other.granted.threads == session.granted.threads
    assert any("threads" in note for note in other.granted.notes)


def test_cuda_is_refused_by_name_where_there_is_none() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("a GPU is there")
    with pytest.raises(UnavailableError, match="cuda"):
        JaxBackend().load(bind("f0"), LoadOptions(device="cuda", max_seq=32))


def test_sizes() -> None:
    assert [next_size(n, 96) for n in (1, 2, 16, 17, 25, 33, 49, 65, 95)] == [
        *(1, 16, 16, 24, 32, 48, 64, 96, 96)
    ]
    assert [next_power(n, 256, 640) for n in (1, 256, 257, 600)] == [256, 256, 512, 640]
    inputs = {
        "tokens": tokens_of(3, 19),
        "rows": ints(3, 0, 1),
        "starts": ints(0, 0, 0),
        "lengths": ints(17, 1, 7),
    }
    arrays, end, answer = pad(inputs, 4, 96)
    assert arrays["tokens"].shape == (4, 24)
    assert (end, answer) == (24, (slice(0, 3),))
    assert arrays["lengths"].tolist() == [17, 1, 7, 0]

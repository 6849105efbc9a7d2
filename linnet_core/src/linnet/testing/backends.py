"""The suite that every backend passes. A plugin's own tests subclass it::

    from linnet.testing.backends import BackendSuite

    class TestMine(BackendSuite):
        backend = "mine"

It compares logits with the NumPy reference on models whose shapes show faults: 6 heads over 2 key
heads, ``head_dim`` 16 beside a hidden size of 48, random norms and biases, ragged batches. It
needs pytest, and the backend installed; it asks only for what the backend's capabilities declare.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from linnet.errors import RequestError, UnavailableError
from linnet.plugins.descriptors import Backend, Capability
from linnet.plugins.interfaces import LoadOptions, Session
from linnet.plugins.manager import plugin_manager
from linnet.reference.backend import ReferenceBackend
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "f0": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim_8": {"head_dim": 8},
    "one_kv_head": {"num_key_value_heads": 1},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "yarn_rope": {"rope_parameters": YARN},
    "window": {"sliding_window": 7},
}
"""What each variant of the F0 config changes."""

ROWS, MAX_SEQ = 4, 96


def variant(name: str) -> dict[str, Any]:
    """The config of a variant, its rope stated in one dialect only."""
    changes = VARIANTS[name]
    config = f0_config(**changes)
    if "rope_parameters" in changes:
        config.pop("rope_theta", None)
        config.pop("rope_scaling", None)
    return config


def bind(name: str) -> BoundModel:
    """A bound model of a variant, its weights drawn from the seed 0."""
    checkpoint = random_checkpoint(variant(name), seed=0)
    manager = plugin_manager()
    family = manager.implementation(manager.family(checkpoint.config["model_type"]))
    return family.bind(checkpoint)  # type: ignore[no-any-return]


def ints(*values: int) -> Array:
    """An i32 vector."""
    return np.array(values, np.int32)


class BackendSuite:
    """Set ``backend`` to the name; narrow ``modes``, ``variants`` or ``dtypes`` if need be."""

    backend: ClassVar[str]
    modes: ClassVar[tuple[str, ...] | None] = None
    variants: ClassVar[tuple[str, ...]] = tuple(VARIANTS)
    tolerance: ClassVar[float] = 1e-4

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test that loads a model runs for each mode and variant."""
        if "pair" in metafunc.fixturenames:
            modes = self.modes or plugin_manager().backend(self.backend).modes
            pairs = [(mode, name) for mode in modes for name in self.variants]
            metafunc.parametrize("pair", pairs, ids=["-".join(p) for p in pairs], indirect=True)

    @pytest.fixture(scope="class")
    @classmethod
    def descriptor(cls) -> Backend:
        """What the plugin registered; the tests skip where it cannot run."""
        descriptor = plugin_manager().backend(cls.backend)
        probe = plugin_manager().implementation(descriptor).probe()
        if not probe.available:
            pytest.skip(f"{cls.backend}: {probe.detail}")
        return descriptor

    @pytest.fixture(scope="class")
    @classmethod
    def pair(
        cls, request: pytest.FixtureRequest, descriptor: Backend
    ) -> Iterator[tuple[Session, Session]]:
        """A session of the backend under test, and the reference for the same model."""
        mode, name = request.param
        model = bind(name)
        options = LoadOptions(mode=mode, dtype="f32", rows=ROWS, max_seq=MAX_SEQ, threads=2)
        tested = plugin_manager().implementation(descriptor).load(model, options)
        reference = ReferenceBackend().load(
            model, LoadOptions(dtype="f64", rows=ROWS, max_seq=MAX_SEQ)
        )
        yield tested, reference
        tested.close()
        reference.close()

    def close_to(self, tested: Array, reference: Array) -> None:
        """Logits within the tolerance."""
        assert tested.dtype == np.float32
        np.testing.assert_allclose(tested, reference, atol=self.tolerance, rtol=0)

    def both(self, pair: tuple[Session, Session], entry: str, **inputs: Array) -> Array:
        """Run an entry on both, compare, and give the logits of the one under test."""
        tested, reference = (session.run(entry, inputs) for session in pair)
        self.close_to(tested, reference)
        return tested

    @pytest.fixture(autouse=True)
    def needs(self, request: pytest.FixtureRequest) -> None:
        """Skip what the backend does not declare, naming the capability."""
        marker = request.node.get_closest_marker("needs")
        declared = plugin_manager().backend(self.backend).capabilities
        if marker and marker.args[0] not in declared:
            pytest.skip(f"{self.backend} does not declare {marker.args[0]}")

    def test_granted_is_what_was_asked(self, pair: tuple[Session, Session]) -> None:
        granted = pair[0].granted
        assert (granted.backend, granted.dtype) == (self.backend, "f32")
        assert (granted.rows, granted.max_seq) == (ROWS, MAX_SEQ)

    @pytest.mark.needs(Capability.FORWARD)
    def test_forward(self, pair: tuple[Session, Session]) -> None:
        for length in (1, 7, 64):
            tokens = tokens_of(3, length)
            assert self.both(pair, "forward", tokens=tokens).shape[:2] == (3, length)

    @pytest.mark.needs(Capability.CACHE)
    def test_extend_in_uneven_chunks_is_one_forward(self, pair: tuple[Session, Session]) -> None:
        tokens = tokens_of(1, 41)
        whole = pair[1].run("forward", {"tokens": tokens})
        start = 0
        for size in (1, 7, 19, 14):
            logits = pair[0].run(
                "extend",
                {
                    "tokens": tokens[:, start : start + size],
                    "rows": ints(2),
                    "starts": ints(start),
                    "lengths": ints(size),
                },
            )
            start += size
            self.close_to(logits, whole[:, start - 1])

    @pytest.mark.needs(Capability.CACHE)
    def test_ragged_rows_then_decode(self, pair: tuple[Session, Session]) -> None:
        """Rows of 19, 1 and 7 tokens, out of order, then steps with one row idle."""
        tokens, lengths = tokens_of(3, 19), ints(19, 1, 7)
        where = {"rows": ints(3, 0, 1), "starts": ints(0, 0, 0), "lengths": lengths}
        self.both(pair, "extend", tokens=tokens, **where)
        positions = ints(1, 7, -1, 19)
        for step in range(3):
            live = positions >= 0
            following = tokens_of(1, ROWS, seed=step)[0]
            inputs = {"tokens": following, "positions": positions}
            tested, reference = (session.run("decode", inputs) for session in pair)
            self.close_to(tested[live], reference[live])
            assert np.isfinite(tested).all(), "an idle row gave something that is not finite"
            positions = np.where(live, positions + 1, -1).astype(np.int32)

    @pytest.mark.needs(Capability.CACHE)
    def test_a_row_is_as_new_when_used_again(self, pair: tuple[Session, Session]) -> None:
        for length in (60, 5):
            tokens = tokens_of(1, length, seed=length)
            where = {"rows": ints(1), "starts": ints(0), "lengths": ints(length)}
            logits = pair[0].run("extend", {"tokens": tokens, **where})
            self.close_to(logits, pair[1].run("forward", {"tokens": tokens})[:, -1])

    @pytest.mark.needs(Capability.CACHE)
    def test_the_last_position_of_the_cache(self, pair: tuple[Session, Session]) -> None:
        tokens = tokens_of(1, MAX_SEQ)
        where = {"rows": ints(0), "starts": ints(0), "lengths": ints(MAX_SEQ - 1)}
        self.both(pair, "extend", tokens=tokens[:, :-1], **where)
        positions = ints(MAX_SEQ - 1, -1, -1, -1)
        following = ints(int(tokens[0, -1]), 0, 0, 0)
        tested, reference = (
            session.run("decode", {"tokens": following, "positions": positions}) for session in pair
        )
        self.close_to(tested[0], reference[0])

    @pytest.mark.needs(Capability.CHOICE)
    def test_choice_is_the_reference_s(self, pair: tuple[Session, Session]) -> None:
        """Greedy and sampled tokens are equal; a row's do not depend on its neighbours."""
        prompt = tokens_of(ROWS, 9)
        where = {
            "rows": np.arange(ROWS, dtype=np.int32),
            "starts": np.zeros(ROWS, np.int32),
            "lengths": np.full(ROWS, 9, np.int32),
        }
        options = {
            "seeds": ints(1, 2, -3, 2**31 - 1),
            "temperature": np.array([0.0, 1.0, 1.5, 0.7], np.float32),
            "top_k": ints(0, 5, 0, 1000),
            "top_p": np.array([1.0, 1.0, 0.6, 0.9], np.float32),
            "min_p": np.array([0.0, 0.0, 0.0, 0.05], np.float32),
        }
        for choice in ({}, options):
            kind = "sample" if choice else "greedy"
            inputs = {"tokens": prompt, **where, **choice}
            tokens, expected = (s.run(f"extend_{kind}", inputs) for s in pair)
            np.testing.assert_array_equal(tokens, expected)
            positions = np.full(ROWS, 9, np.int32)
            for _ in range(4):
                step = {"tokens": tokens, "positions": positions, **choice}
                tested, reference = (s.run(f"decode_{kind}", step) for s in pair)
                np.testing.assert_array_equal(tested, reference)
                assert tested.dtype == np.int32
                tokens, positions = tested, positions + 1

    @pytest.mark.needs(Capability.CACHE)
    def test_results_belong_to_the_caller(self, pair: tuple[Session, Session]) -> None:
        """A backend that reuses its buffers copies them out: five kept steps all differ."""
        kept = []
        for position in range(5):
            inputs = {
                "tokens": ints(position, 0, 0, 0),
                "positions": ints(position, -1, -1, -1),
            }
            kept.append(pair[0].run("decode", inputs)[0])
        assert len({row.tobytes() for row in kept}) == 5

    @pytest.mark.needs(Capability.CACHE)
    def test_bad_inputs_are_refused(self, pair: tuple[Session, Session]) -> None:
        good = {
            "tokens": tokens_of(1, 4),
            "rows": ints(0),
            "starts": ints(0),
            "lengths": ints(4),
        }
        bad = {
            "tokens": tokens_of(1, 4) + 1000,
            "rows": ints(ROWS),
            "starts": ints(MAX_SEQ - 3),
            "lengths": ints(5),
        }
        for name, value in bad.items():
            with pytest.raises(RequestError, match=name):
                pair[0].run("extend", {**good, name: value})
        with pytest.raises(RequestError, match="rows"):
            pair[0].run("extend", {n: v for n, v in good.items() if n != "rows"})

    def test_what_is_not_there_is_refused(self, descriptor: Backend) -> None:
        implementation = plugin_manager().implementation(descriptor)
        for options in (
            LoadOptions(dtype="f8", max_seq=MAX_SEQ),
            LoadOptions(device="abacus", max_seq=MAX_SEQ),
            LoadOptions(mode="nonsense", max_seq=MAX_SEQ),
        ):
            with pytest.raises(UnavailableError):
                implementation.load(bind("f0"), options)

    def test_a_closed_session_refuses(self, descriptor: Backend) -> None:
        options = LoadOptions(dtype="f32", rows=ROWS, max_seq=MAX_SEQ)
        session = plugin_manager().implementation(descriptor).load(bind("f0"), options)
        session.close()
        with pytest.raises(UnavailableError, match="closed"):
            session.run("forward", {"tokens": tokens_of(1, 4)})


def tokens_of(batch: int, length: int, seed: int = 0) -> Array:
    """Random i32 ids ``[batch, length]`` below the F0 vocabulary of 136."""
    return np.random.default_rng([seed, batch, length]).integers(
        0, 136, (batch, length), dtype=np.int32
    )

"""How far one output is from another: logits from logits, or tokens from tokens.

Works on arrays and knows nothing of models, backends or what made either output.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from linnet.errors import ComparisonError
from linnet.weights.checkpoint import Array

BANDS: tuple[tuple[int, int | None], ...] = (
    (0, 16),
    (16, 64),
    (64, 256),
    (256, 1024),
    (1024, None),
)
"""Positions from the first up to, but not including, the second: faults of rotary tables, windows
and caches grow with the position, and a mean over all of them hides it."""

_CHUNK = 1 << 21
"""Logits compared at once: 16 MiB for each temporary f64 array, whatever the vocabulary."""


@dataclass(frozen=True)
class Band:
    """Top-1 agreement at positions ``start`` to ``stop`` (excluded; None is the end)."""

    start: int
    stop: int | None
    positions: int
    agreed: int

    @property
    def name(self) -> str:
        """``16-63``, or ``1024+`` for the open one."""
        return f"{self.start}+" if self.stop is None else f"{self.start}-{self.stop - 1}"

    @property
    def top1(self) -> float:
        """The share of positions that agree, 0 to 1."""
        return self.agreed / self.positions


@dataclass(frozen=True)
class Place:
    """One logit: its index on the leading axes, its position, its token id."""

    row: tuple[int, ...]
    position: int
    token: int


@dataclass(frozen=True)
class Distance:
    """How far logits are from the reference's.

    ``max_abs`` and ``mean_abs`` are of the difference of logits; ``max_abs_at`` is where the
    largest is. ``kl`` and ``kl_max`` are KL(reference || other) in nats, the mean over positions
    and the largest of any position. ``top1`` is the share of positions that agree (see
    ``compare``), ``bands`` the same by position, as far as there are positions.
    ``first_divergence`` has, for every row (the leading axes flattened), the first position that
    does not agree, None if all do.

    ``non_finite`` counts the logits of the other output that are infinite or NaN. If there is
    one, the four measures are infinite, ``max_abs_at`` is the first such place, and no bound
    holds.
    """

    positions: int
    max_abs: float
    max_abs_at: Place
    mean_abs: float
    kl: float
    kl_max: float
    top1: float
    bands: tuple[Band, ...]
    first_divergence: tuple[int | None, ...]
    non_finite: int = 0

    def within(self, bound: float) -> bool:
        """Whether no logit is further off than ``bound``; never with a logit that is not finite."""
        return self.non_finite == 0 and self.max_abs <= bound

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; an infinite measure is null, and ``non_finite`` says why."""
        bands = [{**asdict(b), "name": b.name, "top1": b.top1} for b in self.bands]
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in {
                **asdict(self),
                "bands": bands,
                "first_divergence": list(self.first_divergence),
            }.items()
        }


def compare(
    reference: Array,
    other: Array,
    *,
    lengths: Array | None = None,
    positions: Array | None = None,
) -> Distance:
    """How far ``other`` is from ``reference``: logits f32 or f64 ``[..., S, V]``.

    ``lengths`` (integers ``[...]``) says how many positions of each row count, all when left
    out. ``positions`` (integers ``[S]``, ascending) says which positions of the text the S are,
    ``0..S-1`` when left out; bands, places and divergences are in its terms.

    At a position the two agree when the token that ``other`` chooses (the highest logit, the
    lowest id among equals, as greedy choice does) has the reference's highest logit: in a tie of
    the reference any of the tied will do, in a tie of the other the choice is what counts.
    A position where ``other`` is not finite never agrees.

    Raises ComparisonError for shapes or dtypes that do not fit, nothing to compare, and a
    reference that is not finite.
    """
    _check_logits(reference, other)
    *leading, count, vocab = reference.shape
    row_lengths = _row_lengths(lengths, tuple(leading), count)
    places = np.arange(count) if positions is None else np.asarray(positions)
    if places.shape != (count,) or places.dtype.kind not in "iu" or (np.diff(places) <= 0).any():
        raise ComparisonError(
            f"positions must be {count} ascending integers, one for each logit row"
        )

    total = _Total()
    agrees = np.zeros((*leading, count), bool)
    for row in np.ndindex(*leading):
        for some in _chunks(int(row_lengths[row]), vocab):
            agrees[row][some] = total.add(reference[row][some], other[row][some], row, places[some])
    if not total.positions:
        raise ComparisonError("there are no positions to compare")

    counted = np.arange(count) < row_lengths[..., None]
    return Distance(
        positions=total.positions,
        max_abs=total.max_abs,
        max_abs_at=total.at,
        mean_abs=total.sum_abs / (total.positions * vocab),
        kl=total.sum_kl / total.positions,
        kl_max=total.max_kl,
        top1=int(agrees.sum()) / total.positions,
        bands=tuple(_bands(agrees, counted, places)),
        first_divergence=_first_divergence(agrees, counted, places),
        non_finite=total.non_finite,
    )


@dataclass
class _Total:
    """What is summed over the chunks."""

    positions: int = 0
    max_abs: float = -1.0  # so that even a first difference of 0 has a place
    at: Place = field(default_factory=lambda: Place((), 0, 0))
    sum_abs: float = 0.0
    sum_kl: float = 0.0
    max_kl: float = 0.0
    non_finite: int = 0

    def add(self, reference: Array, other: Array, row: tuple[int, ...], places: Array) -> Array:
        """Add logits ``[n, V]``; whether each of the n positions agrees."""
        broken = int(np.count_nonzero(~np.isfinite(reference)))
        if broken:
            raise ComparisonError(
                f"the reference has {broken} logits that are not finite at row {row}, positions "
                f"{places[0]} to {places[-1]}: nothing can be compared with it"
            )
        x, y = reference.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(y)
        whole = finite.all(axis=-1)
        with np.errstate(over="ignore", invalid="ignore"):
            gap = np.where(finite, np.abs(x - y), np.inf)
            kl = np.where(whole, _kl(x, y), np.inf)
        worst = int(gap.argmax())
        if gap.flat[worst] > self.max_abs:
            self.max_abs = float(gap.flat[worst])
            position, token = divmod(worst, x.shape[-1])
            self.at = Place(row, int(places[position]), token)
        self.positions += len(x)
        self.sum_abs += float(gap.sum())
        self.sum_kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))
        self.non_finite += int(np.count_nonzero(~finite))
        chosen = np.take_along_axis(x, y.argmax(axis=-1)[:, None], axis=-1)[:, 0]
        agrees: Array = whole & (chosen == x.max(axis=-1))
        return agrees


def _kl(x: Array, y: Array) -> Array:
    """KL(softmax x || softmax y) of the last axis, in nats; f64 ``[n, V]`` to ``[n]``."""
    log_p, log_q = _log_softmax(x), _log_softmax(y)
    p = np.exp(log_p)
    # A token of no probability counts nothing, even where log_p - log_q overflows.
    terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    return np.maximum(terms.sum(axis=-1), 0.0)  # type: ignore[no-any-return]


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]


def _check_logits(reference: Array, other: Array) -> None:
    for name, logits in (("reference", reference), ("other", other)):
        if logits.dtype not in (np.float32, np.float64):
            raise ComparisonError(f"the {name}'s logits are {logits.dtype}, not float32 or float64")
    if reference.shape != other.shape:
        raise ComparisonError(
            f"the reference's logits are {list(reference.shape)}, the other's {list(other.shape)}"
        )
    if reference.ndim < 2 or not reference.size:
        raise ComparisonError(
            f"logits are [..., positions, vocab] with at least one; these are "
            f"{list(reference.shape)}"
        )


def _row_lengths(lengths: Array | None, leading: tuple[int, ...], count: int) -> Array:
    if lengths is None:
        return np.full(leading, count)
    lengths = np.asarray(lengths)
    if lengths.shape != leading or lengths.dtype.kind not in "iu":
        raise ComparisonError(
            f"lengths are {lengths.dtype} {list(lengths.shape)}; they must be integers "
            f"{list(leading)}, one for each row"
        )
    if (lengths < 0).any() or (lengths > count).any():
        raise ComparisonError(
            f"lengths go from {lengths.min()} to {lengths.max()}; there are {count} positions"
        )
    return lengths


def _chunks(length: int, vocab: int) -> Iterator[slice]:
    step = max(1, _CHUNK // vocab)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _bands(agrees: Array, counted: Array, places: Array) -> Iterator[Band]:
    for start, stop in BANDS:
        inside = counted & (places >= start) & (places < (math.inf if stop is None else stop))
        number = int(inside.sum())
        if number:
            yield Band(start, stop, number, int((agrees & inside).sum()))


def _first_divergence(agrees: Array, counted: Array, places: Array) -> tuple[int | None, ...]:
    differs = (counted & ~agrees).reshape(-1, len(places))
    return tuple(int(places[row.argmax()]) if row.any() else None for row in differs)


@dataclass(frozen=True)
class TokenDistance:
    """How far chosen tokens are from the reference's, for engines that give no logits.

    ``tokens`` is how many were compared, ``agreement`` the share that is equal, 0 to 1.
    ``first_divergence`` has, for every row, the index of the first token that is not, None if
    all are. After it two greedy texts go separate ways: agreement says less than where it is.
    """

    tokens: int
    agreement: float
    first_divergence: tuple[int | None, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "first_divergence": list(self.first_divergence)}


def compare_tokens(
    reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> TokenDistance:
    """Compare rows of token ids, index by index.

    Where one row is longer, each token that the other lacks counts as different. Raises
    ComparisonError for a different number of rows, or no tokens at all.
    """
    if len(reference) != len(other):
        raise ComparisonError(
            f"the reference has {len(reference)} rows of tokens, the other {len(other)}"
        )
    tokens = equal = 0
    first: list[int | None] = []
    for ours, theirs in zip(reference, other, strict=True):
        longest = max(len(ours), len(theirs))
        same = [int(a) == int(b) for a, b in zip(ours, theirs, strict=False)]
        same += [False] * (longest - len(same))
        tokens += longest
        equal += sum(same)
        first.append(same.index(False) if False in same else None)
    if not tokens:
        raise ComparisonError("there are no tokens to compare")
    return TokenDistance(tokens, equal / tokens, tuple(first))


@dataclass(frozen=True)
class LogprobDistance:
    """How far an engine's listed log-probabilities are from the reference's logits.

    ``listed`` tokens are compared at each position, of ``vocab``. ``max_abs`` is of the difference
    of log-probabilities of those that are likely: ``LIKELY`` or more to either. ``kl`` and
    ``kl_max`` are KL(reference || other) in nats, of the distribution over the listed tokens and
    the rest as one: exact when all are listed, a lower bound otherwise. ``top1`` and
    ``first_divergence`` are as in ``Distance``.
    """

    positions: int
    listed: int
    vocab: int
    max_abs: float
    kl: float
    kl_max: float
    top1: float
    first_divergence: int | None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


LIKELY = 1e-6
"""Probability below which a token's log-probability says nothing of what an engine will choose."""


def compare_logprobs(reference: Array, ids: Array, logprobs: Array) -> LogprobDistance:
    """How far an engine is that lists its likeliest tokens: for those that give no logits.

    ``reference`` are logits f32 or f64 ``[S, V]``; ``ids`` integers and ``logprobs`` floats
    ``[S, K]``, each token at most once in a row, in nats, over the whole vocabulary. Raises
    ComparisonError for what does not fit, and for a number that is not finite.
    """
    if reference.ndim != 2 or not reference.size:
        raise ComparisonError(f"logits are [positions, vocab]; these are {list(reference.shape)}")
    count, vocab = reference.shape
    if ids.shape != logprobs.shape or ids.ndim != 2 or len(ids) != count or not ids.size:
        raise ComparisonError(
            f"{list(ids.shape)} ids and {list(logprobs.shape)} log-probabilities were listed for "
            f"{count} positions"
        )
    if ids.min() < 0 or ids.max() >= vocab or not np.isfinite(logprobs).all():
        raise ComparisonError("the engine listed a token or a log-probability that is none")
    if not np.isfinite(reference).all():
        raise ComparisonError("the reference has logits that are not finite")
    if any(len(np.unique(row)) != ids.shape[1] for row in ids):
        raise ComparisonError("the engine listed a token twice for one position")
    log_p = np.take_along_axis(_log_softmax(reference.astype(np.float64)), ids, axis=-1)
    log_q = logprobs.astype(np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    terms = p * (log_p - log_q)
    kl = terms.sum(axis=-1)
    if ids.shape[1] < vocab:
        rest_p = np.maximum(1 - p.sum(axis=-1), 1e-12)
        rest_q = np.maximum(1 - q.sum(axis=-1), 1e-12)
        kl += rest_p * np.log(rest_p / rest_q)
    kl = np.maximum(kl, 0.0)
    likely = np.maximum(p, q) >= LIKELY
    chosen = np.take_along_axis(ids, log_q.argmax(axis=-1)[:, None], axis=-1)
    agrees = np.take_along_axis(reference, chosen, axis=-1)[:, 0] == reference.max(axis=-1)
    return LogprobDistance(
        positions=count,
        listed=ids.shape[1],
        vocab=vocab,
        max_abs=float(np.abs(log_p - log_q)[likely].max()),
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float(agrees.mean()),
        first_divergence=None if agrees.all() else int(agrees.argmin()),
    )

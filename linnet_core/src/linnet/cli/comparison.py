"""What ``linnet check`` measures: the reference's logits, and how far each backend's are from them.

Sessions are closed one after the other, so memory holds one model and two sets of logits. Prints
nothing but the tracebacks of backends that fail.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from linnet.cli.output import note
from linnet.errors import PluginError, UnavailableError

if TYPE_CHECKING:
    from linnet.distance import Distance
    from linnet.plugins.descriptors import Backend
    from linnet.plugins.interfaces import Granted, LoadOptions, Session
    from linnet.plugins.manager import PluginManager
    from linnet.weights.binding import BoundModel
    from linnet.weights.checkpoint import Array

BOUNDS = {"f32": (1e-3, 1e-2), "f64": (1e-3, 1e-2)}
"""The largest difference of a logit that passes where ``--bound`` does not say: the first, or
``MARGIN`` times the reference's own noise where that is more, but never more than the second. A
narrower dtype is as far off as it is: it is measured."""
MARGIN = 4
CHUNKS = (1, 7, 19, 64, 127)
"""Lengths of ``extend`` calls, over and over: below, at and beside the sizes that kernels like."""
DECODED = 32
"""Tokens at the end that ``decode`` takes one by one, at most."""
SKIPPED = {"reference": "NumPy is slow; --backend reference runs it"}
"""Backends that run only when they are asked for by name."""


@dataclass(frozen=True)
class Target:
    """A backend to compare. ``asked`` says that the user named it: then it must be available."""

    backend: "Backend"
    mode: str
    dtype: str
    asked: bool


@dataclass(frozen=True)
class Row:
    """One comparison, or why there is none."""

    target: Target
    status: str
    reason: str | None = None
    entry: str | None = None
    granted: "Granted | None" = None
    bound: float | None = None
    distance: "Distance | None" = None

    @property
    def bad(self) -> bool:
        """Whether the command fails for it."""
        return self.status == "failed" or (self.status == "unavailable" and self.target.asked)


@dataclass(frozen=True)
class Reference:
    """Logits f32 ``[1, S, V]`` of ``tokens`` ``[1, S]``, and what they were computed with.

    ``noise`` is how far the reference is from itself when it sees only the first 7/8 of the
    tokens: later ones change nothing but the order of its sums. At some positions a model makes
    a thousand times more of such a change than at others, and nothing can be closer than that.
    """

    backend: "Backend"
    granted: "Granted"
    tokens: "Array"
    logits: "Array"
    noise: "Distance"
    passed_over: tuple[str, ...]


def random_tokens(vocab: int, count: int, seed: int) -> "Array":
    """Random ids i32 ``[1, count]``; the first one does not come again, so it can be told apart."""
    import numpy as np

    ids = np.random.default_rng(seed).integers(0, vocab, (1, count), dtype=np.int32)
    again = ids[0, 1:] == ids[0, 0]
    ids[0, 1:][again] = (ids[0, 0] + 1) % vocab
    return ids


def run_reference(
    manager: "PluginManager",
    model: "BoundModel",
    tokens: "Array",
    name: str | None,
    options: "LoadOptions",
) -> Reference:
    """The reference's logits, f32 on its own choice of device.

    Without a name, those that cannot run this model here are passed over, each with its reason;
    any other error is raised: that a checkpoint does not fit is no reason to look elsewhere.
    """
    from linnet.distance import compare
    from linnet.plugins.descriptors import Capability

    needed = {Capability.REFERENCE, Capability.FORWARD}
    if name is None:
        able = [b for b in manager.backends.values() if needed <= b.capabilities]
        candidates = sorted(able, key=lambda b: (-b.reference_priority, b.name))
    else:
        candidates = [manager.backend(name)]
        if not needed <= candidates[0].capabilities:
            raise UnavailableError(f"the {name} backend does not serve as a reference")
    passed_over = []
    for backend in candidates:
        wanted = replace(options, mode=backend.modes[0], dtype="f32", device=None)
        try:
            with closing(open_session(manager, backend, model, wanted)) as session:
                granted = session.granted
                logits = session.run("forward", {"tokens": tokens})
                first = max(1, tokens.shape[1] * 7 // 8)
                again = session.run("forward", {"tokens": tokens[:, :first]})
        except (PluginError, UnavailableError) as error:
            if name is not None:
                raise
            passed_over.append(f"{backend.name}: {error}")
        else:
            noise = compare(logits[:, :first], again)
            return Reference(backend, granted, tokens, logits, noise, tuple(passed_over))
    raise UnavailableError(
        f"no backend can be the reference here: {'; '.join(passed_over) or 'none is installed'}"
    )


def choose_targets(
    manager: "PluginManager",
    asked: Sequence[tuple["Backend", str]],
    dtypes: Sequence[str],
    truth: Reference,
    device: str | None,
) -> Iterator[Target]:
    """What was asked for, else every backend; not the reference against itself."""
    for dtype in dtypes:
        for backend, mode in asked:
            yield Target(backend, mode, dtype, asked=True)
        if not asked:
            for backend in manager.backends.values():
                itself = backend == truth.backend and dtype == "f32" and device is None
                if not itself:
                    yield Target(backend, backend.modes[0], dtype, asked=False)


def compare_target(
    manager: "PluginManager",
    model: "BoundModel",
    truth: Reference,
    target: Target,
    options: "LoadOptions",
    bound: float | None,
) -> list[Row]:
    """A row for every entry that the backend has, or one that says why there is none."""
    from linnet.distance import compare

    backend = target.backend
    if target.dtype not in backend.dtypes:
        return [Row(target, "unavailable", f"it computes in {', '.join(backend.dtypes)}")]
    if backend.name in SKIPPED and not target.asked:
        return [Row(target, "skipped", SKIPPED[backend.name])]
    limit = default_bound(target.dtype, truth.noise) if bound is None else bound
    wanted = replace(options, mode=target.mode, dtype=target.dtype)
    rows: list[Row] = []
    entry: str | None = None
    granted = None
    try:
        with closing(open_session(manager, backend, model, wanted)) as session:
            granted = session.granted
            if (granted.mode, granted.dtype) != (target.mode, target.dtype):
                raise UnavailableError(
                    f"{target.mode} in {target.dtype} was asked for, and {granted.mode} in "
                    f"{granted.dtype} granted"
                )
            for name, positions, other in outputs(session, backend, truth.tokens):
                entry = name
                found = compare(truth.logits[:, positions], other, positions=positions)
                status, reason = judge(found, limit)
                rows.append(Row(target, status, reason, entry, granted, limit, found))
    except (PluginError, UnavailableError) as error:
        rows.append(Row(target, "unavailable", str(error), granted=granted))
    except Exception as error:  # a backend's own fault must not hide how the others do
        note("".join(traceback.format_exception(error)).rstrip())
        where = "" if entry is None else f" after {entry}"
        reason = f"{type(error).__name__}{where}: {error}"
        rows.append(Row(target, "failed", reason, granted=granted, bound=limit))
    return rows


def outputs(
    session: "Session", backend: "Backend", tokens: "Array"
) -> Iterator[tuple[str, "Array", "Array"]]:
    """Each entry's logits f32 ``[1, n, V]``, with the n positions that they are of."""
    import numpy as np

    from linnet.plugins.descriptors import Capability

    count = tokens.shape[1]
    if Capability.FORWARD in backend.capabilities:
        yield "forward", np.arange(count), session.run("forward", {"tokens": tokens})
    if Capability.CACHE not in backend.capabilities:
        return
    decoded = min(DECODED, count // 4)
    start = 0
    ends: list[int] = []
    logits = []
    while start < count - decoded:
        size = min(CHUNKS[len(ends) % len(CHUNKS)], count - decoded - start)
        where = {"rows": [0], "starts": [start], "lengths": [size]}
        inputs = {name: np.array(value, np.int32) for name, value in where.items()}
        logits.append(session.run("extend", {"tokens": tokens[:, start : start + size], **inputs}))
        start += size
        ends.append(start - 1)
    yield "extend", np.array(ends), np.stack(logits, axis=1)
    if decoded:
        positions = np.arange(start, count, dtype=np.int32)
        steps = [
            session.run("decode", {"tokens": tokens[:, at], "positions": positions[i : i + 1]})
            for i, at in enumerate(positions)
        ]
        yield "decode", positions, np.stack(steps, axis=1)


def default_bound(dtype: str, noise: "Distance") -> float | None:
    """The bound of a dtype where the user gave none; None where there is none."""
    if dtype not in BOUNDS:
        return None
    least, most = BOUNDS[dtype]
    return min(max(least, MARGIN * noise.max_abs), most)


def judge(distance: "Distance", bound: float | None) -> tuple[str, str | None]:
    """The status of a comparison, with the reason where it failed."""
    at = f"position {distance.max_abs_at.position}, token {distance.max_abs_at.token}"
    if distance.non_finite:
        return "failed", f"{distance.non_finite} logits are not finite, the first at {at}"
    if bound is None:
        return "measured", None
    if distance.within(bound):
        return "passed", None
    return "failed", f"{distance.max_abs:.3g} at {at} is beyond {bound:g}"


def open_session(
    manager: "PluginManager", backend: "Backend", model: "BoundModel", options: "LoadOptions"
) -> "Session":
    """A session for the caller to close. Raises PluginError or UnavailableError for none."""
    implementation = manager.implementation(backend)
    probe = implementation.probe()
    if not probe.available:
        raise UnavailableError(probe.detail)
    session: Session = implementation.load(model, options)
    return session

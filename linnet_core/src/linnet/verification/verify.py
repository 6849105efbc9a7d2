"""How far an engine running an export is from the model it was made of, and whether that will do.

The model's own logits come from the reference backend, the export's from the engine it is for:
nothing of Linnet's is in the path that is measured.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linnet.distance import Distance, LogprobDistance, compare, compare_logprobs
from linnet.errors import PluginError, UnavailableError, VerificationError
from linnet.plugins.descriptors import Backend, Capability
from linnet.plugins.interfaces import LoadOptions
from linnet.plugins.manager import plugin_manager
from linnet.runtime.threads import thread_budget
from linnet.runtime.tokenizer import Tokenizer
from linnet.verification.engine import Engine, ask
from linnet.verification.probe import STRINGS, TEXT
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array

FILE = "linnet-export.json"
POSITIONS = 512
SEED = 20


@dataclass(frozen=True)
class Bound:
    """What a distance must hold; None is not asked of it."""

    top1: float
    kl: float | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class Reference:
    """Whose logits count: a backend by name, or the first choice; and its dtype."""

    dtype: str = "f32"
    backend: str | None = None


def verify(
    model: BoundModel,
    artifact: Path,
    engine: Engine,
    bound: Bound,
    *,
    reference: Reference | None = None,
    python: str | Path | None = None,
) -> dict[str, Any]:
    """Run ``engine`` on ``artifact`` and compare it with ``model``; the content of ``FILE``.

    At most 512 positions of a text (of random ids where there is no tokenizer), and the token ids
    of 60 strings. Raises VerificationError beyond the bound, naming each figure and each string;
    UnavailableError where the engine or the reference cannot run.
    """
    tokenizer = None
    if model.checkpoint.text.tokenizer is not None:
        tokenizer = Tokenizer(model.checkpoint.text, model.checkpoint.config)
    tokens = probe_tokens(model, tokenizer)
    texts = STRINGS if tokenizer is not None else ()
    answer = ask(
        engine, artifact, tokens[0].tolist(), texts, threads=thread_budget(None), python=python
    )
    name, logits = _reference_logits(model, tokens, reference or Reference())
    distance: Distance | LogprobDistance
    if answer.logits is not None:
        distance = compare(logits, answer.logits[None])
    elif answer.listed is not None:
        count = len(answer.listed[0])  # an engine may say nothing of what follows the last token
        distance = compare_logprobs(logits[0, :count], *answer.listed)
    else:
        raise UnavailableError(f"{engine.name} gave neither logits nor log-probabilities")
    ids = [[] if tokenizer is None else tokenizer.encode(text) for text in texts]
    differing = [
        {"text": text, "model": ours, "engine": theirs}
        for text, ours, theirs in zip(texts, ids, answer.ids, strict=True)
        if ours != theirs
    ]
    faults = [
        *_beyond(distance, bound),
        *(
            f"{d['text']!r} has the token ids {d['engine']}, not {d['model']}"
            for d in differing[:3]
        ),
        *([f"and {len(differing) - 3} more texts"] if len(differing) > 3 else []),
    ]
    if faults:
        raise VerificationError(
            f"{engine.name} ({answer.versions}) is too far from the model, by {name}: "
            f"{'; '.join(faults)}; nothing was written"
        )
    return {
        "schema": 1,
        "engine": engine.name,
        "versions": answer.versions,
        "reference": name,
        "distance": distance.to_json(),
        "bound": asdict(bound),
        "texts": {"compared": len(texts), "differing": differing},
    }


def save(content: Mapping[str, Any], folder: Path) -> Path:
    """Write what ``verify`` gave into the export's folder."""
    path = folder / FILE
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return path


def probe_tokens(model: BoundModel, tokenizer: Tokenizer | None) -> Array:
    """Token ids i32 ``[1, S]``: of a text, as often as it takes, or random ones."""
    # Engines want room for the token that follows.
    count = max(1, min(POSITIONS, (model.max_positions or POSITIONS + 1) - 1))
    if tokenizer is None:
        return np.random.default_rng(SEED).integers(0, model.vocab, (1, count), dtype=np.int32)
    ids = tokenizer.encode(TEXT)
    while 0 < len(ids) < count:
        ids += tokenizer.encode(TEXT, add_special_tokens=False)
    if not ids:
        raise UnavailableError("the tokenizer gives no ids for any text")
    return np.array([ids[:count]], np.int32)


def _beyond(distance: Distance | LogprobDistance, bound: Bound) -> list[str]:
    """Every figure that does not hold, with its bound; one that is not a number never holds."""
    faults = []
    if not distance.top1 >= bound.top1:
        first = distance.first_divergence
        where = first[0] if isinstance(first, tuple) else first
        faults.append(
            f"top-1 agreement is {distance.top1:.4f}, below {bound.top1:g} (the first that differs "
            f"is position {where})"
        )
    for name, most in (("kl", bound.kl), ("max_abs", bound.max_abs)):
        value = getattr(distance, name)
        if most is not None and not value <= most:
            faults.append(f"{name} is {value:.3g}, above {most:g}")
    return faults


def _reference_logits(model: BoundModel, tokens: Array, reference: Reference) -> tuple[str, Array]:
    """The name of what ran, and logits f32 ``[1, S, V]``."""
    manager = plugin_manager()
    options = LoadOptions(
        dtype=reference.dtype, max_seq=tokens.shape[1], threads=thread_budget(None)
    )
    if reference.backend is not None:
        candidates = [manager.backend(reference.backend)]
    else:
        needed = {Capability.REFERENCE, Capability.FORWARD}
        able = [b for b in manager.backends.values() if needed <= b.capabilities]
        candidates = sorted(able, key=lambda b: (-b.reference_priority, b.name))
    reasons = []
    for backend in candidates:
        try:
            return _logits(backend, model, tokens, options)
        except (UnavailableError, PluginError) as error:
            reasons.append(f"{backend.name}: {error}")
    raise UnavailableError(f"no reference can run this model: {'; '.join(reasons)}")


def _logits(
    backend: Backend, model: BoundModel, tokens: Array, options: LoadOptions
) -> tuple[str, Array]:
    implementation = plugin_manager().implementation(backend)
    probe = implementation.probe()
    if not probe.available:
        raise UnavailableError(probe.detail)
    with closing(implementation.load(model, options)) as session:
        granted = session.granted
        logits: Array = session.run("forward", {"tokens": tokens})
    notes = f" ({', '.join(granted.notes)})" if granted.notes else ""
    return f"{granted.backend} {granted.mode} {granted.dtype}{notes}", logits

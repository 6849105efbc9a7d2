"""Servers that read an ordinary checkpoint and compute something else, without a word.

Each was seen: in the engine itself, or, of Text Generation Inference, in its sources. What an
engine refuses by itself has no place here.
"""

from collections.abc import Mapping

from linnet.weights.binding import BoundModel

SGLANG = "SGLang (0.5.23)"
TGI = "Text Generation Inference (3.3)"
NO_WINDOW = ("mistral", "qwen2", "qwen3", "phi3")
"""Types whose windows SGLang does not apply: their models there have none."""
ALWAYS_TIED = ("gemma3_text", "gpt2")
"""Types whose head SGLang takes to be the embedding."""
TGI_YARN = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None}
"""YaRN's settings as ``layers/rotary.py`` of TGI has them, whatever a config says."""


def read_otherwise(model: BoundModel) -> list[str]:
    """A note for each server that would answer otherwise than the model; most models have none."""
    notes = []
    kind = model.checkpoint.config.get("model_type")
    windows = [w for w in model.describe.get("windows", ()) if w is not None]
    if kind in NO_WINDOW and any(w < (model.max_positions or 0) for w in windows):
        notes.append(
            f"{SGLANG} does not apply the sliding window of {min(windows)} tokens that a {kind} "
            "has: its answers differ in longer texts"
        )
    if kind in ALWAYS_TIED and not any(p.tied_to for p in model.program.parameters):
        notes.append(
            f"{SGLANG} takes the embedding for the head of a {kind}, which has one of its own: its "
            "answers differ"
        )
    rope = model.describe.get("rope")
    if isinstance(rope, Mapping) and rope["kind"] == "linear":
        notes.append(f"{TGI} does not apply linear rotary scaling: its answers differ")
    if isinstance(rope, Mapping) and rope["kind"] == "yarn":
        settings = dict(rope["settings"])
        other = [
            f"{key} {settings[key]}"
            for key, its in TGI_YARN.items()
            if settings.get(key) not in (None, its)
        ]
        if other:
            notes.append(f"{TGI} has no {', '.join(other)} for YaRN: its answers differ")
    return notes

"""The text side of a Transformers checkpoint: carried over, and completed for older readers."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnet.runtime.tokenizer import Tokenizer, end_ids
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import TextFiles
from linnet.weights.paths import inside

BESIDE = (
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""What some readers want beside ``tokenizer.json``: copied where the source has it."""
NEW_CLASSES = ("TokenizersBackend", "PythonBackend", "SentencePieceBackend")
"""Class names that Transformers 5 writes and no earlier release knows."""
OLD_CLASS = "PreTrainedTokenizerFast"
"""The class that reads any ``tokenizer.json``, in every release."""


def write_text_files(model: BoundModel, folder: Path) -> None:
    """Write every text file that the model has into ``folder``."""
    text, config = model.checkpoint.text, model.checkpoint.config
    if text.tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(text.tokenizer.encode())
    settings = tokenizer_config(text)
    if settings:
        write_json(folder / "tokenizer_config.json", settings)
    if text.chat_template is not None:
        (folder / "chat_template.jinja").write_bytes(text.chat_template.encode())
    generation = generation_config(text, config, model.vocab)
    if generation:
        write_json(folder / "generation_config.json", generation)
    source = model.checkpoint.location
    if model.checkpoint.format == "safetensors" and source.is_dir():
        for name in BESIDE:
            if (source / name).exists():
                shutil.copyfile(inside(source, name), folder / name)


def tokenizer_config(text: TextFiles) -> dict[str, Any]:
    """``tokenizer_config.json`` as readers before and since Transformers 5 take it."""
    settings = dict(text.tokenizer_config or {})
    if settings.get("tokenizer_class") in NEW_CLASSES:
        settings["tokenizer_class"] = OLD_CLASS
    if isinstance(settings.get("extra_special_tokens"), list):
        # 5's name for the list; before, that name was for a table, and a list stopped the reader.
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if text.chat_template is not None:
        settings.setdefault("chat_template", text.chat_template)
    return settings


def generation_config(text: TextFiles, config: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """``generation_config.json`` with every id that ends a text, whichever file states it."""
    content = dict(text.generation_config or {})
    for name in ("bos_token_id", "pad_token_id"):
        if config.get(name) is not None:
            content.setdefault(name, config[name])
    if text.tokenizer is None:
        found = end_ids(text, config, vocab=vocab)
    else:
        found = Tokenizer(text, config).end_ids
    if found:
        ends = sorted(found)
        content["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """An object as Transformers writes it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")

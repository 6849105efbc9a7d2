"""Transformers checkpoint folders: config, safetensors, tokenizer; nothing outside the folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnet.errors import CheckpointError
from linnet.weights.checkpoint import Checkpoint, StoredTensor, TextFiles
from linnet.weights.safetensors import read_file
from linnet.weights.strict_json import MAX_BYTES, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsFormat:
    """Opens a folder with ``config.json`` and safetensors, or one safetensors file in it."""

    def open(self, path: Path) -> Checkpoint:
        """Raises CheckpointError for whatever is missing, damaged or outside the folder."""
        folder = path.parent if path.is_file() else path
        if not folder.is_dir():
            raise CheckpointError(f"{path} does not exist")
        config = read_json(inside(folder, "config.json"))
        notes: list[str] = []
        if path.is_file():
            tensors = read_file(inside(folder, path.name))
        elif (folder / INDEX).exists():
            tensors = _sharded(folder, notes)
        elif (folder / SINGLE).exists():
            tensors = read_file(inside(folder, SINGLE))
        else:
            raise CheckpointError(_nothing(folder))
        dtypes = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name)}
        if len(set(map(str, dtypes.values()))) > 1:
            notes.append(f"config.json states {dtypes}: what the tensors are stored in is used")
        return Checkpoint(
            folder, "safetensors", config, tensors, _text(folder, notes), tuple(notes)
        )


def inside(folder: Path, name: str) -> Path:
    """``folder / name`` if that is a plain name whose real path stays inside the folder.

    A Hub cache's snapshot links to blobs beside it; those belong to the model. Raises
    CheckpointError otherwise: a model from a stranger names no file of ours.
    """
    if not name or name in (".", "..") or any(mark in name for mark in "/\\:\0"):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name")
    path = folder / name
    real = path.resolve()
    roots = [folder.resolve()]
    snapshot = folder.resolve().parent
    if snapshot.name == "snapshots" and snapshot.parent.name.startswith("models--"):
        roots.append(snapshot.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{path} leads to {real}, which is outside the model's folder")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    return path


def _sharded(folder: Path, notes: list[str]) -> dict[str, StoredTensor]:
    """The tensors an index lists, each from the shard that it names."""
    index = read_json(inside(folder, INDEX))
    places = index.get("weight_map")
    if not isinstance(places, Mapping) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map from tensor to file name")
    shards = {name: read_file(inside(folder, name)) for name in dict.fromkeys(places.values())}
    tensors = {}
    for name, shard in places.items():
        if name not in shards[shard]:
            there = [other for other, held in shards.items() if name in held]
            where = f"it is in {there[0]}" if there else "no shard has it"
            raise CheckpointError(f"{folder / INDEX}: says that {name} is in {shard}, but {where}")
        tensors[name] = shards[shard][name]
    for shard, held in shards.items():
        extra = sorted(held.keys() - {name for name, place in places.items() if place == shard})
        if extra:
            raise CheckpointError(
                f"{folder / shard}: holds {extra[0]}, which {INDEX} does not place there"
            )
    if (folder / SINGLE).exists() and SINGLE not in shards:
        notes.append(f"{SINGLE} lies beside the shards; the shards are used, as {INDEX} says")
    return tensors


def _nothing(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has no safetensors, only {pickles[0]}: pickle files can run code when "
            "they are read, so Linnet does not read them; save the model again with "
            "save_pretrained(..., safe_serialization=True)"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return f"{folder} has neither {SINGLE} nor {INDEX}, but {others[0]}: name that file instead"
    return f"{folder} has neither {SINGLE} nor {INDEX}"


def _text(folder: Path, notes: list[str]) -> TextFiles:
    def optional(name: str) -> Path | None:
        return inside(folder, name) if (folder / name).exists() else None

    def text(path: Path) -> str:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many")
        try:
            return path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not UTF-8: {error}") from None

    tokenizer = optional("tokenizer.json")
    if tokenizer is None:
        old = [n for n in ("tokenizer.model", "vocab.json") if (folder / n).exists()]
        if old:
            notes.append(f"no tokenizer.json; {old[0]} alone is not read")
    config_path, generation = optional("tokenizer_config.json"), optional("generation_config.json")
    config = read_json(config_path) if config_path else None
    template = optional("chat_template.jinja")
    return TextFiles(
        tokenizer=text(tokenizer) if tokenizer else None,
        tokenizer_config=config,
        generation_config=read_json(generation) if generation else None,
        chat_template=text(template) if template else _template(folder, config or {}),
    )


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template in ``tokenizer_config.json``: a string, or the default of a named list."""
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        for item in template:
            if isinstance(item, dict) and item.get("name") == "default":
                found = item.get("template")
                if isinstance(found, str):
                    return found
        return None
    raise CheckpointError(f"{folder}: chat_template is {type(template).__name__}, not text")

"""Transformers checkpoint folders: config, safetensors, tokenizer; nothing outside the folder."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linnet.errors import CheckpointError
from linnet.weights.checkpoint import Checkpoint, StoredTensor, TextFiles
from linnet.weights.paths import inside, reading
from linnet.weights.safetensors import INDEX, SINGLE, read_file
from linnet.weights.strict_json import read_json, read_text

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsFormat:
    """Opens a folder with ``config.json`` and safetensors, or one safetensors file in it."""

    def open(self, path: Path) -> Checkpoint:
        """Raises CheckpointError for whatever is missing, damaged or outside the folder."""
        with reading(path):
            return _open(path)


def _open(path: Path) -> Checkpoint:
    notes: list[str] = []
    folder = path if path.is_dir() else path.parent
    tensors = _folder(path, notes) if path.is_dir() else _file(path)
    return with_files_beside(folder, "safetensors", tensors, notes)


def with_files_beside(
    folder: Path, kind: str, tensors: Mapping[str, StoredTensor], notes: Sequence[str] = ()
) -> Checkpoint:
    """Tensors in the Transformers dialect, with the config and text files of their folder.

    ``kind`` is the name of the format.

    Raises CheckpointError for a config that is missing, and for files that are damaged.
    """
    if not _there(folder, "config.json"):
        raise CheckpointError(
            f"{folder} has no config.json: tensors alone do not say what model they are; put "
            "the model's config.json beside them"
        )
    config, found = read_json(inside(folder, "config.json")), [*notes]
    dtypes = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name)}
    if len(set(map(str, dtypes.values()))) > 1:
        stated = " and ".join(f"{name} {value}" for name, value in dtypes.items())
        found.append(f"config.json states {stated}: the type that tensors are stored in counts")
    text = _text(folder, found)
    return Checkpoint(folder, kind, config, tensors, text, tuple(found))


def _file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file that the user named."""
    if path.suffix in _PICKLES:
        raise CheckpointError(_refuse_pickle(path))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if re.search(r"-\d+-of-0*([2-9]|[1-9]\d+)\.safetensors$", path.name):
        raise CheckpointError(f"{path} is one shard of several; name the folder {path.parent}")
    return read_file(inside(path.parent, path.name))


def _folder(folder: Path, notes: list[str]) -> dict[str, StoredTensor]:
    if _there(folder, INDEX):
        return _sharded(folder, notes)
    if _there(folder, SINGLE):
        return read_file(inside(folder, SINGLE))
    files = sorted(path.name for path in folder.iterdir())
    others = [name for name in files if name.endswith(".safetensors")]
    if others:
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}, but {others[0]}: name that file, or fetch "
            "the index if it is a shard"
        )
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(_refuse_pickle(folder / pickles[0]))
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _refuse_pickle(path: Path) -> str:
    return (
        f"{path} is a pickle, which can run code when it is read, so Linnet does not read it; if "
        "you trust it, load it with Transformers' from_pretrained and save it again with "
        "save_pretrained, which writes safetensors"
    )


def _sharded(folder: Path, notes: list[str]) -> dict[str, StoredTensor]:
    """The tensors an index lists, each from the shard that it names."""
    index = folder / INDEX
    places = read_json(inside(folder, INDEX)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: has no weight_map from tensor to file name")
    listed: dict[str, set[str]] = {}
    for name, shard in places.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index}: places {name} in {str(shard)[:80]}, which is no name")
        listed.setdefault(shard, set()).add(name)
    # Every path is looked at before the first is opened.
    paths = {shard: inside(folder, shard) for shard in listed}
    shards = {shard: read_file(path) for shard, path in paths.items()}
    for shard, names in listed.items():
        for name in sorted(names - shards[shard].keys()):
            there = [other for other, held in shards.items() if name in held]
            where = f"it is in {there[0]}" if there else "no shard has it"
            raise CheckpointError(f"{index}: says that {name} is in {shard}, but {where}")
        for name in sorted(shards[shard].keys() - names):
            where = f"places in {places[name]}" if name in places else "does not list"
            raise CheckpointError(f"{paths[shard]}: holds {name}, which {INDEX} {where}")
    if _there(folder, SINGLE) and SINGLE not in shards:
        notes.append(f"{SINGLE} lies beside the shards; the shards are used, as {INDEX} says")
    return {name: shards[shard][name] for name, shard in places.items()}


def _text(folder: Path, notes: list[str]) -> TextFiles:
    def text(name: str) -> str | None:
        return read_text(inside(folder, name)) if _there(folder, name) else None

    def table(name: str) -> dict[str, Any] | None:
        return read_json(inside(folder, name)) if _there(folder, name) else None

    tokenizer = text("tokenizer.json")
    if tokenizer is None:
        old = [name for name in ("tokenizer.model", "vocab.json") if _there(folder, name)]
        if old:
            notes.append(
                f"no tokenizer.json, only {old[0]}, which is not read: save the tokenizer again "
                "with Transformers' AutoTokenizer"
            )
    config = table("tokenizer_config.json")
    template = text("chat_template.jinja")
    if template is None:
        template = _template(folder, config or {}, notes)
    return TextFiles(tokenizer, config, table("generation_config.json"), template)


def _template(folder: Path, config: Mapping[str, Any], notes: list[str]) -> str | None:
    """The template in ``tokenizer_config.json``: a string, or the default of a named list."""
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    path = folder / "tokenizer_config.json"
    named: dict[str, str] = {}
    for item in template if isinstance(template, list) else [template]:
        match item:
            case {"name": str(name), "template": str(source)}:
                named[name] = source
            case _:
                raise CheckpointError(
                    f"{path}: chat_template is neither text nor a list of named templates"
                )
    if named and "default" not in named:
        notes.append(f"{path.name} has the chat templates {', '.join(named)}, but no default")
    return named.get("default")


def _there(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of that name, if only a link that leads nowhere."""
    return (folder / name).exists() or (folder / name).is_symlink()

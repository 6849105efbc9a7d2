"""The format as Linnet sees it: what is opened, and what the plugin says of itself."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linnet.errors import CheckpointError
from linnet.weights.checkpoint import Checkpoint
from linnet_gguf.plugin import linnet_register_formats
from linnet_gguf.reader import GGUFFormat


def test_a_file_and_a_folder_with_one(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    path = make_llama(layers=1).write(tmp_path / "model.gguf")
    for given in (path, tmp_path):
        checkpoint = GGUFFormat().open(given)
        assert isinstance(checkpoint, Checkpoint)
        assert (checkpoint.format, checkpoint.location) == ("gguf", path)
        assert checkpoint.nbytes() == sum(t.read().nbytes for t in checkpoint.tensors.values())


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \.gguf file"):
        GGUFFormat().open(tmp_path)
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"2 GGUF files: name one of a\.gguf, b\.gguf"):
        GGUFFormat().open(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        GGUFFormat().open(tmp_path / "c.gguf")


def test_the_descriptor_names_what_it_opens() -> None:
    (format_,) = linnet_register_formats()
    module, _, name = format_.target.partition(":")
    assert getattr(__import__(module, fromlist=[name]), name) is GGUFFormat
    assert (format_.name, format_.suffixes, format_.markers) == ("gguf", (".gguf",), ("*.gguf",))


def test_the_entry_module_imports_only_linnet() -> None:
    code = (
        "import sys, linnet_gguf.plugin as p; p.linnet_register_formats(); "
        "print(sorted({'numpy', 'gguf', 'ml_dtypes', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

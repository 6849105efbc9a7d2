"""The plugin author's book has every hook, field, capability and method, as it is in the code."""

import inspect
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linnet.errors import UnavailableError
from linnet.plugins import hookspecs, interfaces
from linnet.plugins.descriptors import API_VERSION, Capability
from linnet.plugins.discovery import DISABLED, Stage
from linnet.plugins.registration import HOOKS, check_descriptor
from linnet.spec.program import Program
from linnet.weights.checkpoint import Array

BOOK = Path(__file__).parents[2] / "docs" / "plugins.md"
TEXT = " ".join(BOOK.read_text().split())
INTERFACES = [
    interfaces.FamilyInterface,
    interfaces.FormatInterface,
    interfaces.BackendInterface,
    interfaces.Session,
    interfaces.ExporterInterface,
    interfaces.BenchMethodInterface,
]


def signature(function: Any) -> str:
    """``name(self, path: Path) -> Checkpoint``, without the modules that names come from."""
    text = str(inspect.signature(function)).replace(inspect.formatannotation(Array), "Array")
    return function.__name__ + re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


def test_the_hooks_of_the_code_are_those_of_the_table() -> None:
    specs = {n for n, _ in inspect.getmembers(hookspecs, inspect.isfunction) if "linnet_" in n}
    assert specs == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented_with_its_signature(name: str) -> None:
    function = getattr(hookspecs, name)
    assert inspect.signature(function).return_annotation == list[HOOKS[name]]
    assert f"`def {signature(function)}`" in TEXT


def test_no_other_hook_is_documented() -> None:
    assert set(re.findall(r"\blinnet_register_\w+", TEXT)) == set(HOOKS)


@pytest.mark.parametrize("kind", HOOKS.values(), ids=lambda kind: kind.__name__)
def test_every_field_is_documented(kind: type) -> None:
    descriptors = TEXT.partition("## Descriptors")[2].partition("## Interfaces")[0]
    part = descriptors.partition(f"**`{kind.__name__}`**")[2].partition("**`")[0]
    common = descriptors.partition("**`")[0]
    assert part
    for field in fields(kind):
        assert f"`{field.name}`" in part or f"`{field.name}`" in common, field.name


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.__name__)
def test_every_method_is_documented_with_its_signature(interface: type) -> None:
    assert f"**`{interface.__name__}`**" in TEXT
    for name, function in inspect.getmembers(interface, inspect.isfunction):
        if not name.startswith("_"):
            assert f"`{signature(function)}`" in TEXT


def test_capabilities_stages_and_switches_are_documented() -> None:
    for value in (*Capability, *Stage):
        assert f"| `{value}` |" in TEXT
    assert f"{DISABLED}=" in TEXT
    assert "`linnet --strict-plugins COMMAND`" in TEXT
    assert f"against: `{API_VERSION}` today" in TEXT


def test_the_plugin_of_the_book_works(tmp_path: Path) -> None:
    text = BOOK.read_text()
    toml = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert toml
    assert tomllib.loads(toml[1])["project"]["entry-points"]["linnet"]
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]:
        exec(block, namespace)
    (descriptor,) = namespace["linnet_register_exporters"]()
    check_descriptor(descriptor)
    exporter = namespace[descriptor.target.partition(":")[2]]()
    model = SimpleNamespace(program=Program("toy", (), (), {}, {}))
    artifact = exporter.export(model, tmp_path / "new" / "out", {})
    assert [path.parent for path in artifact.files] == [tmp_path / "new" / "out"]
    assert "toy" in artifact.files[0].read_text()
    with pytest.raises(UnavailableError, match="has no option dtype"):
        exporter.export(model, tmp_path / "other", {"dtype": "f32"})

"""Descriptors are checked, implementations imported on use, and absences explained."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

import linnet
from linnet.cli.plugins import describe_plugins
from linnet.errors import PluginError
from linnet.plugins.descriptors import (
    Backend,
    BenchMethod,
    Capability,
    Descriptor,
    Exporter,
    Family,
    Format,
)
from linnet.plugins.discovery import FoundPlugin
from linnet.plugins.doctor import Health, examine
from linnet.plugins.manager import OFFICIAL, PluginManager, plugin_manager
from linnet.plugins.registration import RUN_DTYPES, RegisteredPlugin, check_descriptor
from linnet.spec.types import DType

BACKEND = Backend(
    name="fast",
    target="fast_engine:Engine",
    title="Fast",
    modes=("eager",),
    devices=("cpu",),
    dtypes=("f32", "bf16"),
    capabilities=frozenset({Capability.FORWARD}),
    requires=("fastlib",),
    extra="linnet-fast[cpu]",
    api_version=1,
)
FAMILY = Family(name="toy", target="toys:Toy", model_types=("toy",), api_version=1)
FORMAT = Format(name="toys", target="toys:Toys", suffixes=(".toy",), api_version=1)
EXPORTER = Exporter(name="toy_file", target="toys:E", title="Toy", dtypes=("q8_0",), api_version=1)
METHOD = BenchMethod(
    name="toy-bench", target="toys:B", title="Toy", group="toys", dtypes=("f32",), api_version=1
)
FOUND = FoundPlugin("fast", "linnet_fast", "linnet-fast", "3.1")

ENGINE = """
from linnet.plugins.interfaces import Probe

class Engine:
    made = 0

    def __init__(self):
        Engine.made += 1

    def probe(self):
        return Probe(True, "fastlib 1")

    def load(self, model, options):
        raise NotImplementedError
"""


def managing(*offers: Descriptor) -> PluginManager:
    return PluginManager([RegisteredPlugin(FOUND, offers)])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.mark.parametrize("good", [BACKEND, FAMILY, FORMAT, EXPORTER, METHOD])
def test_good_descriptors_pass(good: Descriptor) -> None:
    check_descriptor(good)


@pytest.mark.parametrize(
    ("good", "changes", "message"),
    [
        (BACKEND, {"api_version": 2}, r"API 2, and this Linnet has 1: upgrade linnet"),
        (BACKEND, {"api_version": "1"}, r"API '1', and this Linnet has 1"),
        (BACKEND, {"name": "Fast Engine"}, r"'Fast Engine' is not a good name"),
        (BACKEND, {"name": ""}, r"'' is not a good name"),
        (BACKEND, {"name": "a--b"}, r"'a--b' is not a good name"),
        (BACKEND, {"name": "fast\n"}, r"is not a good name"),
        (BACKEND, {"name": 3}, r"has name 3, which is not str"),
        (BACKEND, {"target": "fast_engine"}, r"target 'fast_engine', not 'package.module:name'"),
        (BACKEND, {"target": "fast-engine:E"}, r"not 'package.module:name'"),
        (BACKEND, {"target": "a.b:"}, r"not 'package.module:name'"),
        (BACKEND, {"modes": ()}, r"'fast' has no modes"),
        (BACKEND, {"modes": "eager"}, r"has modes 'eager', which is not tuple\[str, ...\]"),
        (BACKEND, {"modes": ["eager"]}, r"has modes \['eager'\], which is not tuple"),
        (BACKEND, {"modes": ("eager", "")}, r"has modes \('eager', ''\)"),
        (BACKEND, {"devices": ()}, r"has no devices"),
        (BACKEND, {"dtypes": ()}, r"has no dtypes"),
        (BACKEND, {"dtypes": ("f32", "fp16")}, r"dtypes fp16, which are not among bf16, f16, f32"),
        (BACKEND, {"dtypes": ("float",)}, r"dtypes float, which are not among"),
        (BACKEND, {"capabilities": frozenset()}, r"has no capabilities"),
        (BACKEND, {"capabilities": {Capability.FORWARD}}, r"has capabilities"),
        (BACKEND, {"capabilities": frozenset({"forward"})}, r"which is not frozenset"),
        (BACKEND, {"priority": "high"}, r"has priority 'high', which is not int"),
        (BACKEND, {"priority": True}, r"has priority True, which is not int"),
        (FAMILY, {"model_types": ()}, r"family 'toy' has no model_types"),
        (FORMAT, {"suffixes": ()}, r"format 'toys' has no suffixes or markers"),
        (FORMAT, {"suffixes": ("toy",)}, r"suffix 'toy', which is not '.something'"),
        (EXPORTER, {"dtypes": ()}, r"exporter 'toy_file' has no dtypes"),
        (EXPORTER, {"name": "toy-file"}, r"cannot be reached as linnet.toy-file: use an identif"),
        (EXPORTER, {"name": "spec"}, r"cannot be reached as linnet.spec, which is Linnet's own"),
        (EXPORTER, {"name": "load"}, r"cannot be reached as linnet.load, which is Linnet's own"),
        (METHOD, {"dtypes": ()}, r"bench method 'toy-bench' has no dtypes"),
    ],
)
def test_bad_descriptors_say_what_is_wrong(
    good: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        check_descriptor(replace(good, **changes))


def test_run_dtypes_are_the_float_types_and_the_encodings_of_weights() -> None:
    floats = {str(d) for d in DType if d.is_float and d is not DType.FLOAT}
    assert floats | {"int8", "int4"} == RUN_DTYPES


def test_an_implementation_is_made_once(module: Callable[[str, str], None]) -> None:
    module("fast_engine", ENGINE)
    plugins = managing(BACKEND)
    engine = plugins.implementation(plugins.backend("fast"))
    assert plugins.implementation(plugins.backend("fast")) is engine
    assert type(engine).made == 1


@pytest.mark.parametrize(
    ("code", "extra", "message"),
    [
        (
            "import fastlib.inner",
            "linnet-fast[cpu]",
            r"backend 'fast' needs the module fastlib, which is not installed: "
            r'pip install "linnet-fast\[cpu\]"',
        ),
        ("import fastlib", "", r'pip install "fastlib"'),
        (
            "import other_missing_library",
            "linnet-fast[cpu]",
            r"backend 'fast' of plugin 'fast' \(linnet-fast 3.1\) is broken: ModuleNotFoundError: "
            r"No module named 'other_missing_library' \(see: linnet plugins doctor fast\)",
        ),
        ("x = 1", "", r"is broken: AttributeError: module 'fast_engine' has no attribute 'Engine'"),
        ("raise SystemExit('no')", "", r"is broken: SystemExit: no"),
        ("class Engine:\n    def __init__(self): 1 / 0", "", r"is broken: ZeroDivisionError"),
    ],
)
def test_not_installed_is_told_from_broken(
    module: Callable[[str, str], None], code: str, extra: str, message: str
) -> None:
    module("fast_engine", code)
    descriptor = replace(BACKEND, extra=extra)
    plugins = managing(descriptor)
    with pytest.raises(PluginError, match=message) as caught:
        plugins.implementation(descriptor)
    assert caught.value.__cause__ is not None


def test_names_that_are_not_there() -> None:
    plugins = managing(BACKEND, FAMILY)
    with pytest.raises(PluginError, match=r'^backend \'torch\' is not installed: pip install "lin'):
        plugins.backend("torch")
    with pytest.raises(PluginError, match=r"no backend 'tortch': did you mean 'torch'\?"):
        plugins.backend("tortch")
    with pytest.raises(PluginError, match=r"no backend 'fats': did you mean 'fast'\?"):
        plugins.backend("fats")
    with pytest.raises(PluginError, match=r"no backend 'zzz' \(installed: fast\)"):
        plugins.backend("zzz")
    with pytest.raises(PluginError, match=r"no exporter 'zzz' \(installed: none\)"):
        plugins.exporter("zzz")
    with pytest.raises(PluginError, match=r"format 'gguf' is not installed"):
        plugins.format("gguf")
    assert plugins.family("toy") is FAMILY


def test_a_name_may_be_used_once_for_each_kind() -> None:
    plugins = managing(BACKEND, replace(FAMILY, name="fast"))
    assert (plugins.backend("fast").name, plugins.family("fast").name) == ("fast", "fast")


def test_official_plugins_have_an_extra() -> None:
    assert set(OFFICIAL) <= set(metadata("linnet").get_all("Provides-Extra") or ())


def test_official_plugins_offer_what_is_said_of_them() -> None:
    """For those that are installed here."""
    for plugin in plugin_manager().plugins:
        for kind, name in OFFICIAL.get(plugin.found.name, ()):
            assert any(type(d) is kind and d.name == name for d in plugin.offers), (kind, name)
        if plugin.found.name in OFFICIAL:
            extras = {getattr(d, "extra", "") for d in plugin.offers}
            assert extras <= {"", f"linnet[{plugin.found.name}]"}


def test_the_built_in_plugin_is_like_any_other() -> None:
    (builtin,) = [p for p in plugin_manager().plugins if p.found.builtin]
    assert builtin.found.value == "linnet.builtin"
    (row,) = [r for r in describe_plugins(plugin_manager()) if r["name"] == "builtin"]
    assert set(row["offers"]) == {"backend", "format", "family", "bench method"}
    assert (row["offers"]["backend"], row["offers"]["format"]) == (["reference"], ["safetensors"])
    assert "llama" in row["offers"]["family"]
    assert "serve-linnet-torch" in row["offers"]["bench method"]


def test_the_version_is_that_of_the_distribution() -> None:
    assert linnet.__version__ == metadata("linnet")["Version"]


def examined(code: str, module: Callable[[str, str], None]) -> Any:
    module("fast_engine", code)
    (finding,) = examine(managing(BACKEND), "fast")
    return finding


def test_the_doctor_finds_nothing_wrong(module: Callable[[str, str], None]) -> None:
    finding = examined(ENGINE, module)
    assert (finding.health, finding.detail) == (Health.OK, "fastlib 1")


@pytest.mark.parametrize(
    ("old", "new", "health", "detail"),
    [
        ("Probe(True", "Probe(False", Health.UNAVAILABLE, "fastlib 1"),
        ("from linnet", "import fastlib\nfrom linnet", Health.NOT_INSTALLED, "linnet-fast[cpu]"),
        ("from linnet", "import missing_lib\nfrom linnet", Health.BROKEN, "missing_lib"),
        ("def probe(self)", "def prob(self)", Health.BROKEN, "has no method probe()"),
        ("def load(self, model, options)", "def load(self, model)", Health.BROKEN, "load(model)"),
        ("def load(self, model, options)", "def load(self, a, b, c)", Health.BROKEN, "'c'"),
        ("Probe(True, ", "(True, ", Health.BROKEN, "probe() returned (True"),
        ("return Probe", "raise OSError('gone'); Probe", Health.BROKEN, "OSError: gone"),
    ],
)
def test_the_doctor_finds(
    module: Callable[[str, str], None], old: str, new: str, health: Health, detail: str
) -> None:
    finding = examined(ENGINE.replace(old, new), module)
    assert finding.health is health
    assert detail in finding.detail
    assert ("Traceback" in finding.traceback) is (health is Health.BROKEN)


def test_the_doctor_knows_names() -> None:
    plugins = managing()
    assert [finding.detail for finding in examine(plugins)] == ["offers nothing here"]
    with pytest.raises(PluginError, match=r"'torch' is not installed: pip install \"linnet\[torch"):
        examine(plugins, "torch")
    with pytest.raises(PluginError, match=r"named 'fats': did you mean 'fast'\?"):
        examine(plugins, "fats")


def test_the_built_in_plugin_is_healthy() -> None:
    findings = examine(plugin_manager(), "builtin")
    assert {finding.health for finding in findings} == {Health.OK}, findings


def test_an_exporter_is_reached_by_name(
    module: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module(
        "toys",
        "class E:\n    def export(self, model, folder, options):\n"
        "        return model, folder, options",
    )
    monkeypatch.setattr("linnet.plugins.manager.plugin_manager", lambda: managing(EXPORTER))
    result: Any = linnet.toy_file.export("bound", str(tmp_path), dtype="q8_0")
    assert result == ("bound", tmp_path, {"dtype": "q8_0"})
    with pytest.raises(AttributeError, match=r"no attribute 'ggup': there is no exporter 'ggup'"):
        _ = linnet.ggup
    assert not hasattr(linnet, "__wrapped__")

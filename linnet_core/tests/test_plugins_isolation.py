"""Real distributions, each broken in its own way, beside the ones that work."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from linnet.cli.plugins import describe_plugins
from linnet.errors import PluginError
from linnet.plugins.discovery import DISABLED, find_plugins
from linnet.plugins.manager import OFFICIAL, PluginManager, load_plugins

Fake = Callable[..., str]

HEAD = """
from linnet.plugins.descriptors import Backend, Capability, Family
from linnet.plugins.hookspecs import hookimpl

def backend(name, **changes):
    values = dict(
        name=name, target="fake_target:Engine", title="Fake", modes=("eager",), devices=("cpu",),
        dtypes=("f32",), capabilities=frozenset({Capability.FORWARD}), api_version=1,
    )
    return Backend(**{**values, **changes})
"""


def offering(name: str) -> str:
    """A plugin that works and offers one backend."""
    return f"{HEAD}@hookimpl\ndef linnet_register_backends(): return [backend({name!r})]"


CASES: dict[str, tuple[str, str]] = {
    "import_error": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
    "syntax_error": ("def broken(:", "SyntaxError: invalid syntax"),
    "system_exit": ("raise SystemExit(7)", "SystemExit: 7"),
    "many_lines": (
        "raise RuntimeError('one\\ntwo\\n\\nthree')",
        "RuntimeError: one two three",
    ),
    "unprintable": (
        "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
        "is not used: Odd (see",
    ),
    "long": ("raise ValueError('y' * 10_000)", "ValueError: " + "y" * 500 + "... (see"),
    "wrong_argument": (
        HEAD + "@hookimpl\ndef linnet_register_backends(config): return []",
        "linnet_register_backends takes no arguments, but is linnet_register_backends(config)",
    ),
    "raises_half_way": (
        HEAD
        + "@hookimpl\ndef linnet_register_backends(): return [backend('raises_half_way')]\n"
        + "@hookimpl\ndef linnet_register_models(): raise ValueError('half-way')",
        "ValueError: half-way",
    ),
    "outdated": (
        HEAD + "@hookimpl\ndef linnet_register_backends():\n"
        "    return [backend('outdated', api_version=0)]",
        "backend 'outdated' was written for plugin API 0, and this Linnet has 1: "
        "upgrade the plugin",
    ),
    "from_the_future": (
        HEAD + "@hookimpl\ndef linnet_register_backends():\n"
        "    return [backend('from_the_future', api_version=9)]",
        "plugin API 9, and this Linnet has 1: upgrade linnet",
    ),
    "no_version": (
        HEAD + "@hookimpl\ndef linnet_register_models():\n"
        "    return [Family(name='x', target='a:b', model_types=('x',))]",
        "TypeError: Family.__init__() missing 1 required keyword-only argument: 'api_version'",
    ),
    "unknown_hook": (
        HEAD + "@hookimpl\ndef linnet_register_backend(): return []",
        "there is no hook linnet_register_backend: did you mean linnet_register_backends?",
    ),
    "unmarked_hook": (
        "def linnet_register_backends(): return []",
        "linnet_register_backends is not marked: write @hookimpl above it",
    ),
    "no_hooks": ("x = 1", "no_hooks_mod implements none of: linnet_register_models"),
    "wrapper": (
        HEAD + "@hookimpl(wrapper=True)\ndef linnet_register_backends():\n    return (yield)",
        "linnet_register_backends is a wrapper",
    ),
    "returns_none": (
        HEAD + "@hookimpl\ndef linnet_register_backends(): backend('x')",
        "linnet_register_backends returned NoneType, not a list of Backend",
    ),
    "returns_other": (
        HEAD + "@hookimpl\ndef linnet_register_models(): return [backend('x')]",
        "in its list, not a Family",
    ),
    "twice": (
        HEAD + "@hookimpl\ndef linnet_register_backends(): return [backend('x'), backend('x')]",
        "backend 'x' is offered twice by this plugin",
    ),
    "builtin_name": (
        offering("reference"),
        "the backend 'reference' is claimed by linnet 0.1.0 and by builtin-name-dist 1.2: "
        "pip uninstall builtin-name-dist",
    ),
    "builtin_model_type": (
        HEAD + "@hookimpl\ndef linnet_register_models():\n"
        "    return [Family('mine', 'a:b', ('llama',), api_version=1)]",
        "the model_type 'llama' is claimed by",
    ),
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Installs a distribution: a module and its dist-info, first on this process's path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(
        name: str, code: str, *, plugin: str = "", value: str = "", version: str = "1.2"
    ) -> str:
        distribution = f"{name.replace('_', '-')}-dist"
        (tmp_path / f"{name}_mod.py").write_text(code)
        info = tmp_path / f"{name}_dist-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        entry = f"{plugin or name} = {value or f'{name}_mod'}"
        (info / "entry_points.txt").write_text(f"[linnet]\n{entry}\n")
        monkeypatch.delitem(sys.modules, f"{name}_mod", raising=False)
        return distribution

    return install


def manager() -> PluginManager:
    """The fake plugins and the built-in one."""
    found, broken = find_plugins()
    mine = [plugin for plugin in found if plugin.name not in OFFICIAL]
    return load_plugins(mine, broken=broken)


def linnet(*arguments: str, path: Path, disabled: str = "") -> subprocess.CompletedProcess[str]:
    """The real command line, where only the fake plugins and the built-in one are on."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(path),
        DISABLED: ",".join([*OFFICIAL, disabled]),
    }
    return subprocess.run(
        [sys.executable, "-m", "linnet.cli.main", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_broken_plugin_costs_itself_and_one_line(name: str, fake: Fake, tmp_path: Path) -> None:
    code, message = CASES[name]
    distribution = fake(name, code)
    fake("good", offering("good"))
    plugins = manager()
    (broken,) = plugins.broken
    assert message in str(broken)
    assert str(broken).startswith(f"plugin {name!r} ({distribution} 1.2) is not used: ")
    assert str(broken).endswith(f"(see: linnet plugins doctor {name})")
    assert "\n" not in str(broken)
    assert plugins.backend("good").name == "good"
    assert plugins.backend("reference").target.startswith("linnet.")
    (row,) = [row for row in describe_plugins(plugins) if row["name"] == name]
    assert row["state"] == "broken"
    assert row["distribution"] == distribution
    with pytest.raises(PluginError) as caught:
        plugins.backend(name)
    assert message in str(caught.value)
    assert caught.value.__cause__ is broken.error


def test_the_command_line_goes_on(fake: Fake, tmp_path: Path) -> None:
    for name, (code, _) in CASES.items():
        fake(name, code)
    result = linnet("--version", path=tmp_path)
    assert result.returncode == 0
    assert result.stdout == "linnet 0.1.0\n"
    lines = result.stderr.splitlines()
    assert len(lines) == len(CASES)
    for name, (_, message) in CASES.items():
        (line,) = [line for line in lines if f"plugin {name!r} (" in line]
        assert message in line
    listed = linnet("plugins", "list", path=tmp_path)
    assert listed.returncode == 0
    states = {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines()[1:]}
    assert {states[name] for name in CASES} == {"broken"}
    assert states["builtin"] == "ok"


def test_strict_stops(fake: Fake, tmp_path: Path) -> None:
    assert linnet("--strict-plugins", "--version", path=tmp_path).returncode == 0
    fake("system_exit", CASES["system_exit"][0])
    strict = linnet("--strict-plugins", "plugins", "list", path=tmp_path)
    assert strict.returncode == 2
    assert strict.stdout == ""
    assert strict.stderr.count("\n") == 1


def test_a_plugin_that_prints_spoils_no_json(fake: Fake, tmp_path: Path) -> None:
    fake("chatty", "print('hello')\n" + offering("chatty"))
    result = linnet("plugins", "list", "--json", path=tmp_path)
    assert result.stdout.startswith("[")
    assert "hello" in result.stderr


def test_a_missing_attribute(fake: Fake) -> None:
    fake("lost", "x = 1", value="lost_mod:nothing")
    (broken,) = manager().broken
    assert "AttributeError: module 'lost_mod' has no attribute 'nothing'" in str(broken)
    assert broken.stage == "load"


def test_an_interrupt_is_not_a_broken_plugin(fake: Fake) -> None:
    fake("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        manager()


def test_what_a_broken_plugin_would_have_offered_is_not_forgotten(fake: Fake) -> None:
    """Its module does not import, so nobody knows that it would have given 'engine'."""
    fake("hidden", "import no_such_module_anywhere")
    with pytest.raises(PluginError, match=r"no backend 'engine'.*'hidden'.*no_such_module") as e:
        manager().backend("engine")
    assert isinstance(e.value.__cause__, ModuleNotFoundError)


def test_two_distributions_with_one_plugin_name(fake: Fake) -> None:
    first, second = fake("one", offering("a"), plugin="same"), fake("two", "1/0", plugin="same")
    plugins = manager()
    assert [broken.stage for broken in plugins.broken] == ["collision", "collision"]
    assert [broken.found.distribution for broken in plugins.broken] == [first, second]
    wanted = f"the plugin name 'same' is claimed by {first} 1.2 and by {second} 1.2: pip uninstall"
    for broken in plugins.broken:
        assert wanted in str(broken)
    with pytest.raises(PluginError, match="the plugin name 'same' is claimed by"):
        plugins.backend("same")


def test_nobody_takes_the_built_in_plugins_name(fake: Fake) -> None:
    fake("usurper", offering("usurper"), plugin="builtin")
    plugins = manager()
    assert [plugin.found.distribution for plugin in plugins.plugins] == ["linnet"]
    (broken,) = plugins.broken
    assert "claimed by linnet 0.1.0 and by usurper-dist 1.2" in str(broken)
    assert "pip uninstall usurper-dist" in str(broken)


@pytest.mark.parametrize("order", [("aa", "bb"), ("bb", "aa")])
def test_two_distributions_with_one_backend(fake: Fake, order: tuple[str, str]) -> None:
    """Neither has it, in whichever order they are found; each keeps its name in the message."""
    for name in order:
        fake(name, offering("shared"))
    plugins = manager()
    assert "shared" not in plugins.backends
    assert {broken.found.name for broken in plugins.broken} == {"aa", "bb"}
    with pytest.raises(
        PluginError,
        match=r"the backend 'shared' is claimed by aa-dist 1\.2 and by bb-dist 1\.2: "
        "pip uninstall aa-dist or bb-dist",
    ):
        plugins.backend("shared")


def test_one_distribution_installed_twice_counts_once(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("copy", offering("copy"), version="2.0")
    older = tmp_path / "older" / "copy_dist-1.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: copy-dist\nVersion: 1.0\n")
    (older / "entry_points.txt").write_text("[linnet]\ncopy = copy_mod\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(older.parent)])
    plugins = manager()
    assert plugins.broken == ()
    assert plugins.owner(plugins.backend("copy")).version == "2.0"


@pytest.mark.parametrize("text", ["[linnet]\nno equals sign\n", "[linnet]\n= x\n"])
def test_malformed_metadata_is_one_broken_plugin(fake: Fake, tmp_path: Path, text: str) -> None:
    fake("good", offering("good"))
    fake("mangled", "")
    (tmp_path / "mangled_dist-1.2.dist-info" / "entry_points.txt").write_text(text)
    plugins = manager()
    assert "good" in plugins.backends
    (broken,) = plugins.broken
    assert broken.found.distribution == "mangled-dist"


def test_metadata_of_others_does_not_matter(fake: Fake, tmp_path: Path) -> None:
    fake("good", offering("good"))
    fake("other", "")
    entries = tmp_path / "other_dist-1.2.dist-info" / "entry_points.txt"
    entries.write_text("[console_scripts]\nno equals sign\n")
    assert manager().broken == ()
    entries.write_bytes(b"\xff\xfe[linnet]")
    assert manager().broken == ()


def test_metadata_without_a_name(fake: Fake, tmp_path: Path) -> None:
    fake("nameless", offering("nameless"))
    (tmp_path / "nameless_dist-1.2.dist-info" / "METADATA").unlink()
    plugins = manager()
    assert plugins.owner(plugins.backend("nameless")).distribution == "unknown distribution"


def test_a_disabled_plugin_is_not_imported(fake: Fake, tmp_path: Path) -> None:
    fake("dangerous", "import os; os._exit(9)")
    assert linnet("--version", path=tmp_path).returncode == 9
    result = linnet("plugins", "list", path=tmp_path, disabled="dangerous")
    assert result.returncode == 0
    assert "dangerous  disabled  dangerous-dist 1.2" in result.stdout


def test_asking_for_a_disabled_plugin(fake: Fake) -> None:
    fake("off", offering("off"))
    found, _ = find_plugins()
    off = [plugin for plugin in found if plugin.name == "off"]
    with pytest.raises(PluginError, match=f"backend 'off' cannot be used: {DISABLED} names plugin"):
        load_plugins([], disabled=off).backend("off")

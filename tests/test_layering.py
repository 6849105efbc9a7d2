"""Which package may import which, read off the source without importing anything.

Dependencies point one way: plugins import ``linnet`` and never one another, ``linnet`` imports no
plugin and no framework, and inside ``linnet`` the layers below hold.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "linnet_core"
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))

SPEC = {"errors", "spec"}
WEIGHTS = SPEC | {"weights"}
PLUGIN_HOST = WEIGHTS | {"plugins"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "spec": SPEC,
    "weights": WEIGHTS,
    "distance": WEIGHTS,
    "plugins": PLUGIN_HOST,
    "builtin": {"plugins"},
    "models": WEIGHTS,
    "nest": PLUGIN_HOST | {"nest"},
    "runtime": PLUGIN_HOST | {"nest", "runtime"},
    "reference": PLUGIN_HOST | {"runtime", "reference"},
    "verification": PLUGIN_HOST | {"nest", "runtime", "distance", "verification"},
    "bench": PLUGIN_HOST | {"nest", "runtime", "distance", "bench", "__init__"},
    "cli": PLUGIN_HOST | {"nest", "runtime", "distance", "bench", "cli", "__init__"},
    "testing": PLUGIN_HOST | {"models", "runtime", "reference", "distance", "testing"},
    "__init__": {"errors", "plugins", "runtime"},
    "__main__": {"cli"},
}
"""What each part of ``linnet`` may import of ``linnet``; ``__init__`` is the package itself."""

TESTING_TOOLS = {"pytest", "hypothesis"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file names in an import, wherever it stands, with its line."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            # ``from linnet import spec`` names a part in the second half.
            names = [f"{module}.{alias.name}" for alias in node.names]
            for name in names if module == "linnet" else [module]:
                yield node.lineno, name


def sources(package: Path) -> list[Path]:
    return sorted((package / "src").rglob("*.py"))


def part_of(module: str) -> str:
    """The part of ``linnet`` that a dotted name is in."""
    parts = module.split(".")
    known = len(parts) > 1 and parts[1] in LAYERS
    return parts[1] if known else "__init__"


def allowed_third_parties(package: Path, *, extras: bool = False) -> set[str]:
    """The modules of the distributions that a package depends on, if need be by an extra."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    names = set()
    optional = project.get("optional-dependencies", {}) if extras else {}
    for requirement in [*project["dependencies"], *chain.from_iterable(optional.values())]:
        name = requirement.partition(">")[0].partition("=")[0].partition("[")[0].strip().lower()
        names.add(name.replace("-", "_"))  # so far, every module is called as its distribution
    return names


def complaint(path: Path, line: int, module: str, why: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} imports {module}: {why}"


def test_every_part_of_the_core_has_a_layer() -> None:
    inside = CORE / "src" / "linnet"
    parts = {path.stem for path in inside.iterdir() if path.suffix == ".py"}
    parts |= {path.name for path in inside.iterdir() if (path / "__init__.py").exists()}
    assert parts <= set(LAYERS)


def test_the_layers_of_the_core() -> None:
    complaints = []
    for path in sources(CORE):
        inside = path.relative_to(CORE / "src").with_suffix("")
        own = part_of(".".join(inside.parts))
        for line, module in imports(path):
            if module.partition(".")[0] == "linnet":
                part = part_of(module)
                if part != own and part not in LAYERS[own]:
                    complaints.append(complaint(path, line, module, f"{own} is below {part}"))
    assert complaints == []


def test_scripts_for_other_environments_import_nothing_of_linnet() -> None:
    scripts = [path for package in PLUGINS for path in sources(package) if "engines" in path.parts]
    assert scripts
    for path in scripts:
        for line, module in imports(path):
            assert not module.startswith("linnet"), complaint(path, line, module, "runs elsewhere")


def test_peers_import_only_linnet_and_their_own_at_the_top() -> None:
    """Their modules are imported in two environments, of which neither has all of the other's."""
    peers = [(p, path) for p in PLUGINS for path in sources(p) if "peers" in path.parts]
    assert peers
    for package, path in peers:
        allowed = {"linnet", "numpy", package.name, *sys.stdlib_module_names}
        tops = [
            module
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in [getattr(node, "module", None) or node.names[0].name]
        ]
        for module in tops:
            assert module.partition(".")[0] in allowed, complaint(path, 1, module, "at the top")


@pytest.mark.parametrize("package", [CORE, *PLUGINS], ids=lambda path: path.name)
def test_only_declared_dependencies_are_imported(package: Path) -> None:
    own = {path.name for path in (package / "src").iterdir()}
    allowed = allowed_third_parties(package, extras=True) | own | set(sys.stdlib_module_names)
    assert "linnet" in allowed
    complaints = []
    for path in sources(package):
        testing = "linnet/testing/" in path.as_posix()
        if {"engines", "peers"} & set(path.parts):
            continue  # runs in another engine's environment: see the two tests above
        for line, module in imports(path):
            top = module.partition(".")[0]
            if top not in allowed and not (testing and top in TESTING_TOOLS):
                complaints.append(complaint(path, line, module, "not a declared dependency"))
    assert complaints == []


@pytest.mark.parametrize("package", [CORE, *PLUGINS], ids=lambda path: path.name)
def test_every_declared_dependency_is_imported(package: Path) -> None:
    found = {module.partition(".")[0] for path in sources(package) for _, module in imports(path)}
    assert allowed_third_parties(package) - found == set()


@pytest.mark.parametrize("package", PLUGINS, ids=lambda path: path.name)
def test_plugins_depend_on_no_other_plugin(package: Path) -> None:
    """Nor do their manifests: what is declared may be imported."""
    others = {path.name for path in PLUGINS} - {package.name}
    assert allowed_third_parties(package) & others == set()


@pytest.mark.parametrize("package", PLUGINS, ids=lambda path: path.name)
def test_plugins_use_neither_the_shell_nor_the_built_ins(package: Path) -> None:
    private = {"cli", "builtin"}
    complaints = [
        complaint(path, line, module, "not for plugins")
        for path in sources(package)
        for line, module in imports(path)
        if module.partition(".")[0] == "linnet" and part_of(module) in private
    ]
    assert complaints == []


@pytest.mark.parametrize("package", [CORE, *PLUGINS], ids=lambda path: path.name)
def test_entry_modules_import_only_linnet(package: Path) -> None:
    """They are imported for every command, so they cost what descriptors and hooks cost."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["linnet"]
    assert entries
    for module in entries.values():
        path = package / "src" / (module.replace(".", "/") + ".py")
        light = {"linnet.plugins.descriptors", "linnet.plugins.hookspecs", "linnet.plugins"}
        assert {name for _, name in imports(path)} <= light, path
        package_init = imports(path.parent / "__init__.py")
        ours = {"linnet", path.parent.name, *sys.stdlib_module_names}
        assert {name.partition(".")[0] for _, name in package_init} <= ours, path.parent

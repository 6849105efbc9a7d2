"""Environments of their own: what is asked for, what is told of them, and how they fail."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from linnet import __version__
from linnet.bench import environments as its
from linnet.bench.harness import run_job
from linnet.errors import BenchError, PluginError
from linnet.plugins.benchmark import Job, Workload
from linnet.plugins.descriptors import BenchMethod
from linnet.plugins.discovery import FoundPlugin
from linnet.plugins.manager import PluginManager
from linnet.plugins.registration import RegisteredPlugin, check_descriptor


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LINNET_HOME", str(tmp_path))
    return tmp_path


def method(name: str, *packages: str, environment: str = "peer") -> BenchMethod:
    return BenchMethod(
        name=name,
        target="toys:Toy",
        title=name,
        group="Toys",
        dtypes=("f32",),
        environment=environment,
        packages=packages,
        api_version=1,
    )


def manager(*methods: BenchMethod, distribution: str = "linnet") -> PluginManager:
    found = FoundPlugin("toys", "toys", distribution, "1")
    return PluginManager([RegisteredPlugin(found, methods)])


def record(environment: its.Environment, **changes: object) -> None:
    environment.python.parent.mkdir(parents=True)
    environment.python.symlink_to(sys.executable)
    told = {
        "packages": environment.wanted,
        "distribution": environment.distribution,
        "linnet": __version__,
        "python": "3.11.7",
        "granted": {"Toy_Peer": "1.5"},
        **changes,
    }
    (environment.folder / its.RECORD).write_text(json.dumps(told))


def test_methods_share_an_environment() -> None:
    a, b = method("a", "toy-peer==1.5"), method("b", "toy-peer==1.5")
    (found,) = its.environments(manager(a, b)).values()
    assert (found.name, found.methods) == ("peer", ("a", "b"))
    assert its.find_environment(manager(a, b), "b") == found


def test_one_name_has_one_list_of_packages() -> None:
    with pytest.raises(PluginError, match=r"(?s)'peer' is to hold x==1 .*'a'.* and x==2 \('b'"):
        its.environments(manager(method("a", "x==1"), method("b", "x==2")))


def test_what_is_to_be_removed_is_part_of_the_list() -> None:
    given = replace(method("a", "x==1"), without=("y",))
    (environment,) = its.environments(manager(given)).values()
    assert environment.wanted == ["x==1", "-y"]
    with pytest.raises(PluginError, match=r"x==1, -y .* and x==1 \('b'"):
        its.environments(manager(given, method("b", "x==1")))
    record(environment, packages=["x==1", "-y"], granted={"x": "1"})
    assert its.ready(manager(given), given)[1].versions() == "x 1"


def test_what_there_is_not_is_said() -> None:
    given = manager(method("a", "x==1"), method("own", environment=""))
    with pytest.raises(BenchError, match="no environment 'z'; there are peer"):
        its.find_environment(given, "z")
    with pytest.raises(BenchError, match="own runs in Linnet's own environment"):
        its.find_environment(given, "own")


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "ready"),
        ({"packages": ["toy-peer==1.4"]}, "made for toy-peer==1.4"),
        ({"linnet": "0.0.1"}, "made for linnet 0.0.1 and linnet"),
        ({"unknown": 1}, "not set up"),
    ],
)
def test_the_state_of_an_environment(changes: dict[str, object], state: str) -> None:
    given = method("a", "toy-peer==1.5")
    (environment,) = its.environments(manager(given)).values()
    assert its.state(environment) == "not set up"
    record(environment, **changes)
    assert its.state(environment) == state
    if state == "ready":
        assert its.ready(manager(given), given)[1].versions() == "toy-peer 1.5"
        environment.python.unlink()
        assert its.state(environment) == "its Python is gone"
    with pytest.raises(BenchError, match=r"its environment is .*; run: linnet bench setup peer"):
        its.ready(manager(given), given)


def test_a_row_without_its_environment_says_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = method("a", "toy-peer==1.5")
    monkeypatch.setattr("linnet.bench.harness.plugin_manager", lambda: manager(given))
    job = Job("a", "model", "f32", 1, Workload(), [], None, str(tmp_path))
    with pytest.raises(BenchError, match="not set up; run: linnet bench setup peer"):
        run_job(given, job)


def test_a_setup_that_fails_leaves_nothing(home: Path) -> None:
    """pip is asked for a folder that is none, and its reason is told."""
    given = method("a", "./no-such-folder-of-any-package")
    (environment,) = its.environments(manager(given)).values()
    with pytest.raises(BenchError, match=r"(?s)'peer' could not be set up: .*no-such-folder") as e:
        its.setup(environment, lambda _: None)
    assert not environment.folder.exists()
    assert str(home / "environments" / "peer.log") in str(e.value)


def test_variables_that_lead_home_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert "PYTHONPATH" not in its.clean_variables()
    assert its.clean_variables()["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (method("a"), "needs both environment and packages, or neither"),
        (method("a", "x==1", environment=""), "needs both environment and packages, or neither"),
        (method("a", "x==1", environment="../x"), r"has environment '../x', not a name"),
    ],
)
def test_a_method_that_cannot_be_set_up_is_refused(given: BenchMethod, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        check_descriptor(given)

"""The shell around the commands: what it imports, prints, and exits with."""

import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from linnet.cli.main import COMMANDS
from linnet.cli.output import note, print_json, print_table
from linnet.testing.fixtures import f0_config, random_checkpoint

FRAMEWORKS = {"torch", "jax", "transformers", "onnxruntime", "tensorflow", "gguf"}
HEAVY = {"numpy", "tokenizers", "jinja2", "huggingface_hub", "safetensors", "rich"}


def linnet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "linnet.cli.main", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def trial(body: str) -> list[str]:
    """A process that runs the command line with a command ``try`` of this body."""
    code = f"""
import sys
import linnet.cli.main as shell
import linnet.errors

def trial() -> None:
{textwrap.indent(body, "    ")}

module = type(sys)("linnet.cli.trial")
module.register = lambda app: (app.command("try")(trial), app.command("other")(lambda: None))
module.__spec__ = shell.__spec__
sys.modules["linnet.cli.trial"] = module
shell.COMMANDS = ("trial",)
sys.argv = ["linnet", "try"]
sys.exit(shell.main())
"""
    return [sys.executable, "-c", code]


def run_trial(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(trial(body), capture_output=True, text=True, check=False, timeout=60)


def imported_by(*arguments: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules it has imported by its end."""
    code = f"""
import json, sys
from linnet.cli.main import main
sys.argv = ["linnet", *{arguments!r}]
status = main()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(status)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    *messages, modules = result.stderr.splitlines()
    assert result.returncode == 0, messages
    return result.stdout, set(json.loads(modules))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["plugins", "list"], *([name, "--help"] for name in COMMANDS)],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    _, modules = imported_by(*arguments)
    assert "linnet" in modules
    assert modules & (FRAMEWORKS | HEAVY) == set()


def test_inspect_imports_no_framework(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    checkpoint = random_checkpoint(f0_config(), seed=1)
    tensors = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    printed, modules = imported_by("inspect", str(tmp_path), "--json")
    about = json.loads(printed)
    assert about["parameters"] == sum(values.size for values in tensors.values())
    assert about["bytes"] == 4 * about["parameters"]
    assert about["stored"] == {"f32": len(tensors)}
    assert {"forward", "extend", "decode"} <= set(about["entries"])
    assert modules & FRAMEWORKS == set()
    program, modules = imported_by("inspect", str(tmp_path), "--program", "--json")
    assert json.loads(program)["family"] == "llama"
    assert modules & FRAMEWORKS == set()
    assert "model.layers" in imported_by("inspect", str(tmp_path), "--program")[0]
    assert "function" in imported_by("inspect", str(tmp_path), "--functions")[0]


def test_help_is_quick() -> None:
    """Under 0.4 seconds of CPU time, Python itself included."""

    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert linnet("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_seconds() for _ in range(3)) < 0.4


def test_help_names_every_command() -> None:
    for columns in ("30", "200"):
        result = linnet("--help", COLUMNS=columns, TERM="dumb")
        assert result.returncode == 0
        assert "\x1b" not in result.stdout
        listed = re.findall(r"^  (\w+) ", result.stdout.partition("Commands:")[2], re.MULTILINE)
        assert tuple(listed) == COMMANDS


def test_version() -> None:
    assert linnet("--version").stdout == "linnet 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage: linnet"),
        (["--strict-plugins"], "Missing command"),
        (["inspct"], "No such command 'inspct'. Did you mean 'inspect'"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["--bogus"], "No such option: --bogus"),
        (["inspect", "x", "--program", "--functions"], "exclude one another"),
        (["inspect", "x", "--json", "--source", "torch"], "--json goes with"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(arguments: list[str], message: str) -> None:
    result = linnet(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "\x1b" not in result.stderr


def test_a_failure_is_one_message_and_status_1() -> None:
    result = run_trial("raise linnet.errors.SourceError('no such model')")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: no such model\n"


def test_a_bug_keeps_its_traceback() -> None:
    result = run_trial("1 / 0")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_an_interrupt_is_status_130() -> None:
    result = run_trial(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ours may be ignored\n"
        "os.kill(os.getpid(), signal.SIGINT)"
    )
    assert result.returncode == 130
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_traceback(lines: int) -> None:
    """Whether the pipe breaks as a command prints, or when the last of it is flushed."""
    body = f"import time; time.sleep(0.3)\nfor _ in range({lines}): print('line')"
    with subprocess.Popen(
        trial(body),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert errors == ""


@dataclass(frozen=True)
class Sample:
    path: Path
    numbers: tuple[float, ...]


def test_json_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    numpy = pytest.importorskip("numpy")
    print_json(
        {
            "sample": Sample(Path("a/b"), (1.5, float("inf"), float("nan"))),
            "set": frozenset({"b", "a"}),
            "array": numpy.array([[1, 2]], dtype=numpy.int32),
            "number": numpy.float32(0.5),
            3: None,
            "text": "\U0001fae0",
        }
    )

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(capsys.readouterr().out, parse_constant=refuse) == {
        "sample": {"path": "a/b", "numbers": [1.5, None, None]},
        "set": ["a", "b"],
        "array": [[1, 2]],
        "number": 0.5,
        "3": None,
        "text": "\U0001fae0",
    }


def test_tables_are_as_wide_as_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "BB", "C"), [("long", "x", "y"), ("z", "", "")])
    assert capsys.readouterr().out == "A     BB  C\nlong  x   y\nz\n"


def test_the_doctor_exits_1_only_for_what_is_broken() -> None:
    result = linnet("plugins", "doctor", "builtin", "--json")
    findings = json.loads(result.stdout)
    assert {finding["plugin"]["distribution"] for finding in findings} == {"linnet"}
    broken = any(finding["health"] == "broken" for finding in findings)
    assert result.returncode == int(broken)
    missing = linnet("plugins", "doctor", "bultin")
    assert missing.returncode == 1
    assert missing.stderr.endswith(
        "error: no plugin or distribution is named 'bultin': did you mean 'builtin'?\n"
    )


def test_the_core_pulls_in_no_framework() -> None:
    """What ``pip install linnet`` brings, by the metadata of what is installed here."""
    closure: set[str] = set()
    waiting = ["linnet"]
    while waiting:
        name = waiting.pop()
        if name in closure:
            continue
        closure.add(name)
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue  # for another platform, or another Python
        waiting += [
            canonicalize_name(each.name)
            for each in needed
            if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    assert {"linnet", "numpy", "typer"} <= closure
    heavy = {name for name in closure if name in FRAMEWORKS or name.startswith(("nvidia", "jax"))}
    assert heavy == set()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_a_message():
    done = subprocess.run(
        f"{sys.executable} -m linnet plugins list > /dev/full",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)


def test_notes_do_not_steer_the_terminal(capsys):
    note("a\x1b[31mred\x07")
    assert capsys.readouterr().err == "a\\x1b[31mred\\x07\n"

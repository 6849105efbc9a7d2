"""``linnet check``: which backends it compares, what it finds wrong with them, how it ends.

The model is a toy with a cache, small enough to be run by backends that err on purpose.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from linnet.cli.comparison import random_tokens
from linnet.cli.main import build_app
from linnet.errors import BindingError, PluginError, UnavailableError
from linnet.plugins.descriptors import API_VERSION, Backend, Capability
from linnet.plugins.interfaces import Granted, Probe
from linnet.spec.program import Program
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Checkpoint

VOCAB, MAX_POSITIONS = 50, 200
ALL = frozenset({Capability.FORWARD, Capability.CACHE, Capability.REFERENCE})
FORWARD = frozenset({Capability.FORWARD})
EMBEDDING = np.random.default_rng(0).standard_normal((VOCAB, VOCAB))


class Toy:
    """A backend, and its own session: logits are a decaying sum over the tokens so far."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def probe(self):
        return Probe(True, "1.0")

    def load(self, model, options):
        self.options = options
        self.calls.append(f"load {self.name}")
        self.granted = Granted(
            self.name,
            options.mode,
            options.dtype,
            options.device or "cpu",
            options.rows,
            options.max_seq,
            options.threads,
            notes=("toy 1.0",),
        )
        return self

    def run(self, entry, inputs):
        self.calls.append(f"{entry} {inputs['tokens'].shape}")
        tokens = inputs["tokens"].reshape(-1)
        start = int(inputs.get("starts", inputs.get("positions", [0]))[0])
        if start == 0:
            self.total = np.zeros(VOCAB)
        logits = []
        for token in tokens:
            self.total = 0.9 * self.total + EMBEDDING[token]
            logits.append(self.total)
        result = self.change(np.array(logits, np.float32), start, entry)
        return result[None] if entry == "forward" else result[-1:]

    def change(self, logits, start, entry):
        return logits

    def close(self):
        self.calls.append(f"close {self.name}")


class Off(Toy):
    """0.25 more for token 7 at position 40, and nothing else wrong."""

    def change(self, logits, start, entry):
        if entry == "forward":
            logits[40, 7] += 0.25
        return logits


class Noisy(Toy):
    """Its logits depend a little on how many tokens come after."""

    def change(self, logits, start, entry):
        if len(logits) < MAX_POSITIONS:
            logits[9, 0] += self.noise
        return logits


class WrongCache(Toy):
    """Its logits are wrong only when it decodes."""

    def change(self, logits, start, entry):
        return logits[:, ::-1] if entry == "decode" else logits


class NotFinite(Toy):
    def change(self, logits, start, entry):
        logits[0, 3] = np.nan
        return logits


class Raises(Toy):
    def run(self, entry, inputs):
        if entry == "extend":
            raise IndexError("out of range")
        return super().run(entry, inputs)


class Absent(Toy):
    def probe(self):
        return Probe(False, 'no module toy: pip install "toy"')


class Refuses(Toy):
    def load(self, model, options):
        raise UnavailableError("not this model")


class DoesNotFit(Toy):
    def load(self, model, options):
        raise BindingError("missing keys: w")


class Swaps(Toy):
    def load(self, model, options):
        super().load(model, options)
        self.granted = replace(self.granted, dtype="bf16")
        return self


class Plugins:
    """What is installed."""

    def __init__(self):
        self.backends, self.targets, self.calls, self.broken = {}, {}, [], ()

    def add(self, name, kind=Toy, *, capabilities=ALL, dtypes=("f32", "bf16"), rank=0):
        self.backends[name] = Backend(
            name,
            "x:Y",
            name,
            ("eager", "fast"),
            ("cpu",),
            dtypes,
            capabilities,
            reference_priority=rank,
            api_version=API_VERSION,
        )
        self.targets[name] = kind(name, self.calls)

    def backend(self, name):
        if name not in self.backends:
            raise PluginError(f"there is no backend {name!r}")
        return self.backends[name]

    def implementation(self, descriptor):
        return self.targets[descriptor.name]


@pytest.fixture
def plugins(monkeypatch):
    plugins = Plugins()
    plugins.add("truth", rank=10)
    checkpoint = Checkpoint(Path("m"), "toy", {}, {}, notes=("of the file",))
    program = Program("toy", (), (), {}, {})
    model = BoundModel(program, checkpoint, {}, VOCAB, MAX_POSITIONS, {}, notes=("a note",))
    monkeypatch.setattr("linnet.plugins.manager.plugin_manager", lambda: plugins)
    monkeypatch.setattr("linnet.runtime.load.bind", lambda name, report: model)
    return plugins


def linnet(*arguments):
    return CliRunner().invoke(build_app(), ["check", "m", *arguments])


def report(*arguments, status=0):
    result = linnet(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_every_entry_of_every_backend(plugins):
    plugins.add("good")
    plugins.add("simple", capabilities=FORWARD)
    told = report()
    assert told["passed"] and told["reference"]["backend"] == "truth"
    assert (told["tokens"], told["seed"], told["family"]) == (MAX_POSITIONS, 0, "toy")
    assert told["notes"] == ["of the file", "a note"]
    assert [(row["backend"], row["entry"], row["status"]) for row in told["rows"]] == [
        ("good", "forward", "passed"),
        ("good", "extend", "passed"),
        ("good", "decode", "passed"),
        ("simple", "forward", "passed"),
    ]
    row = told["rows"][0]
    assert (row["mode"], row["dtype"], row["bound"]) == ("eager", "f32", 1e-3)
    assert row["granted"]["device"] == "cpu"
    assert row["distance"]["top1"] == 1.0 and row["distance"]["positions"] == MAX_POSITIONS
    assert told["rows"][2]["distance"]["positions"] == 32


def test_one_session_at_a_time_and_uneven_chunks(plugins):
    plugins.add("good")
    report("--tokens", "60")
    assert plugins.calls[:4] == [
        "load truth",
        "forward (1, 60)",
        "forward (1, 52)",
        "close truth",
    ]
    assert plugins.calls[4:11] == [
        "load good",
        "forward (1, 60)",
        "extend (1, 1)",
        "extend (1, 7)",
        "extend (1, 19)",
        "extend (1, 18)",
        "decode (1,)",
    ]
    assert plugins.calls[-1] == "close good"
    assert plugins.calls.count("decode (1,)") == 15


def test_a_wrong_logit_fails(plugins):
    plugins.add("off", Off, capabilities=FORWARD)
    (row,) = report(status=1)["rows"]
    assert row["status"] == "failed" and row["distance"]["max_abs"] == pytest.approx(0.25)
    assert row["reason"] == "0.25 at position 40, token 7 is beyond 0.001"
    assert report("--bound", "0.3")["passed"]


@pytest.mark.parametrize(
    ("noise", "bound"), [(0, 1e-3), (2e-4, 1e-3), (5e-4, 2e-3), (9, 1e-2), (np.nan, 1e-2)]
)
def test_the_bound_allows_for_the_noise_of_the_reference(plugins, noise, bound):
    """Where its own logits move by 5e-4, nothing else is asked to be nearer than 2e-3."""
    plugins.targets["truth"] = Noisy("truth", plugins.calls)
    plugins.targets["truth"].noise = noise
    plugins.add("good", capabilities=FORWARD)
    told = report()
    assert told["rows"][0]["bound"] == pytest.approx(bound, rel=1e-2)
    assert told["noise"]["max_abs"] == (None if np.isnan(noise) else pytest.approx(noise, rel=1e-2))
    assert report("--bound", "0.5")["rows"][0]["bound"] == 0.5


def test_a_wrong_cache_fails(plugins):
    """``decode`` is told in positions of the text: its first is the 169th of 200."""
    plugins.add("wrong", WrongCache)
    rows = report(status=1)["rows"]
    assert [row["status"] for row in rows] == ["passed", "passed", "failed"]
    assert rows[2]["distance"]["first_divergence"] == [MAX_POSITIONS - 32]
    assert [band["name"] for band in rows[2]["distance"]["bands"]] == ["64-255"]


@pytest.mark.parametrize("options", [(), ("--bound", "inf"), ("--dtype", "bf16")])
def test_what_is_not_finite_fails(plugins, options):
    plugins.add("nan", NotFinite, capabilities=FORWARD)
    told = report(*options, "--backend", "nan", status=1)
    (row,) = told["rows"]
    assert row["status"] == "failed" and row["distance"]["max_abs"] is None
    assert row["reason"] == "1 logits are not finite, the first at position 0, token 3"
    assert not told["passed"]


def test_a_narrow_dtype_is_measured(plugins):
    plugins.add("off", Off, capabilities=FORWARD)
    told = report("--dtype", "bf16")
    assert [(row["backend"], row["dtype"], row["status"]) for row in told["rows"]] == [
        ("truth", "bf16", "measured"),
        ("truth", "bf16", "measured"),
        ("truth", "bf16", "measured"),
        ("off", "bf16", "measured"),
    ]
    assert not report("--dtype", "bf16", "--bound", "0.1", status=1)["passed"]


def test_a_fault_does_not_hide_the_others(plugins):
    plugins.add("bad", Raises)
    plugins.add("good", capabilities=FORWARD)
    result = linnet("--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert [(row["backend"], row["status"]) for row in rows] == [
        ("bad", "passed"),
        ("bad", "failed"),
        ("good", "passed"),
    ]
    assert rows[1]["reason"] == "IndexError after forward: out of range"
    assert "Traceback" in result.stderr
    assert plugins.calls.count("close bad") == 1


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Absent, {}, 'no module toy: pip install "toy"'),
        (Refuses, {}, "not this model"),
        (Swaps, {}, "eager in f32 was asked for, and eager in bf16 granted"),
        (Toy, {"dtypes": ("f16",)}, "it computes in f16"),
    ],
)
def test_what_cannot_run_is_listed(plugins, kind, options, reason):
    """It fails the command only when it was asked for by name."""
    plugins.add("good", capabilities=FORWARD)
    plugins.add("other", kind, **options)
    row = report()["rows"][1]
    assert (row["backend"], row["status"], row["reason"]) == ("other", "unavailable", reason)
    assert row["entry"] is None and row["distance"] is None
    told = report("--backend", "good", "--backend", "other", status=1)
    assert not told["passed"]


def test_numpy_runs_only_when_asked(plugins):
    plugins.add("good", capabilities=FORWARD)
    plugins.add("reference", capabilities=FORWARD)
    assert [row["status"] for row in report()["rows"]] == ["passed", "skipped"]
    assert [row["status"] for row in report("--backend", "reference")["rows"]] == ["passed"]


def test_a_mode_by_name(plugins):
    plugins.add("good", capabilities=FORWARD)
    told = report("--backend", "good", "--backend", "good:fast")
    assert [row["mode"] for row in told["rows"]] == ["eager", "fast"]
    result = linnet("--backend", "good:slow")
    assert isinstance(result.exception, UnavailableError)
    assert str(result.exception) == "the good backend has no mode 'slow'; it has eager, fast"


def test_nothing_to_compare_is_a_failure(plugins):
    result = linnet()
    assert result.exit_code == 1
    assert "nothing was compared" in result.stderr


def test_the_next_reference_is_taken_and_it_is_said(plugins):
    plugins.add("best", Absent, rank=20)
    plugins.add("better", Refuses, rank=15)
    plugins.add("good")
    told = report()
    assert told["reference"]["backend"] == "truth"
    assert told["passed_over"] == [
        'best: no module toy: pip install "toy"',
        "better: not this model",
    ]
    assert "reference passed over: better: not this model" in linnet().stderr
    named = linnet("--reference", "better")
    assert isinstance(named.exception, UnavailableError)


def test_a_reference_that_does_not_fit_is_an_error(plugins):
    """That a checkpoint does not fit is a finding, no reason to look elsewhere."""
    plugins.add("best", DoesNotFit, rank=20)
    assert isinstance(linnet().exception, BindingError)


def test_a_reference_by_name(plugins):
    plugins.add("other", rank=-1)
    plugins.add("simple", capabilities=FORWARD)
    told = report("--reference", "other")
    assert told["reference"]["backend"] == "other"
    assert {row["backend"] for row in told["rows"]} == {"truth", "simple"}
    result = linnet("--reference", "simple")
    assert str(result.exception) == "the simple backend does not serve as a reference"


def test_no_reference_at_all(plugins):
    plugins.backends.clear()
    plugins.add("best", Absent)
    result = linnet()
    assert isinstance(result.exception, UnavailableError)
    assert "no backend can be the reference here: best: no module toy" in str(result.exception)


def test_device_is_that_of_the_compared(plugins):
    plugins.add("good", capabilities=FORWARD)
    report("--device", "cuda:1", "--threads", "3")
    assert plugins.targets["good"].options.device == "cuda:1"
    assert plugins.targets["good"].options.threads == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens", "0"), "--tokens is 0; it must be 1 to 200, the positions of this model"),
        (("--tokens", "201"), "--tokens is 201"),
        (("--dtype", "f32,fp16"), "--dtype has 'fp16', not bf16, f16, f32, f64"),
        (("--bound", "-1"), "--bound is -1.0; it must be 0 or more"),
        (("--bound", "nan"), "--bound is nan"),
    ],
)
def test_wrong_usage(plugins, options, message):
    result = linnet(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_the_table(plugins):
    plugins.add("off", Off, capabilities=FORWARD)
    plugins.add("other", Absent)
    result = linnet("--seed", "3")
    lines = result.stdout.splitlines()
    assert lines[0] == "m: 200 random tokens, seed 3"
    assert lines[1] == "reference: truth eager, f32 on cpu (toy 1.0)"
    assert lines[2] == "its own noise: max abs 0.00e+00, KL 0.00e+00"
    header = "BACKEND MODE DTYPE DEVICE ENTRY MAX ABS KL TOP-1 0-15 16-63 64-255 DIVERGES STATUS"
    assert " ".join(lines[4].split()) == header
    off = lines[5].split()
    assert off[:6] == ["off", "eager", "f32", "cpu", "forward", "2.50e-01"]
    assert "failed: 0.25 at position 40, token 7 is beyond 0.001" in lines[5]
    assert lines[6].endswith('unavailable: no module toy: pip install "toy"')
    assert result.stderr == "note: of the file\nnote: a note\n"


@pytest.mark.parametrize("seed", range(5))
def test_the_first_token_is_told_apart(seed):
    ids = random_tokens(vocab=3, count=50, seed=seed)
    assert ids.shape == (1, 50) and ids.dtype == np.int32
    assert ids.min() >= 0 and ids.max() < 3
    assert ids[0, 0] not in ids[0, 1:]
    np.testing.assert_array_equal(ids, random_tokens(vocab=3, count=50, seed=seed))

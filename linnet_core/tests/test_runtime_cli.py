"""``linnet run`` and ``linnet chat``: what goes to stdout, what to stderr, and how they end."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from linnet.cli.main import build_app
from linnet.errors import RequestError
from linnet.plugins.descriptors import API_VERSION, Backend, Capability
from linnet.plugins.interfaces import Granted
from linnet.runtime.model import Model
from linnet.spec.program import Program
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Checkpoint, TextFiles

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
END = 256


class Echo:
    """Answers with the letters of the last message, in capitals; seed 1 answers with ``?``."""

    def __init__(self):
        self.granted = Granted("echo", "none", "f32", "cpu", 1, 200, 1, notes=("it echoes",))
        self.row = []
        self.interrupt_at = None

    def run(self, entry, inputs):
        if "extend" in entry:
            start = int(inputs["starts"][0])
            self.row[start:] = inputs["tokens"][0].tolist()
            self.prompt = len(self.row)
        else:
            self.row[int(inputs["positions"][0]) :] = inputs["tokens"].tolist()
        done = len(self.row) - self.prompt
        if done == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        if inputs.get("seeds", [0])[0] == 1:
            return np.array([ord("?")], np.int32)
        text = bytes(self.row[: self.prompt]).decode()
        said = text.removesuffix("<a>").rpartition("<u>")[2].upper().encode()
        return np.array([said[done] if done < len(said) else END], np.int32)

    def source(self):
        return None

    def close(self):
        pass


def tokenizer():
    """Ids are bytes: the byte-level alphabet in the order of what its characters stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["</s>"])
    return built.to_str()


@pytest.fixture
def session(monkeypatch):
    session = Echo()
    session.template = TEMPLATE
    session.loads = []

    def load(model, **options):
        session.loads.append((model, options))
        text = TextFiles(
            tokenizer=tokenizer(),
            chat_template=session.template,
            generation_config={"do_sample": True, "temperature": 0.7, "eos_token_id": END},
        )
        checkpoint = Checkpoint(Path(model), "test", {}, {}, text)
        bound = BoundModel(Program("x", (), (), {}, {}), checkpoint, {}, 300, 200, {})
        backend = Backend(
            "echo",
            "x:Y",
            "Echo",
            ("none",),
            ("cpu",),
            ("f32",),
            frozenset({Capability.CACHE, Capability.CHOICE}),
            api_version=API_VERSION,
        )
        return Model(bound, session, backend)

    monkeypatch.setattr("linnet.runtime.load.load", load)
    return session


def linnet(*arguments, text=None):
    return CliRunner().invoke(build_app(), list(arguments), input=text)


def test_run_answers_through_the_chat_template(session):
    result = linnet("run", "m", "hi é")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "HI É\n", "")
    assert bytes(session.row).startswith("<u>hi é<a>HI".encode())


def test_run_raw_continues_the_prompt_as_it_is(session):
    linnet("run", "m", "hi", "--raw", "--max-new-tokens", "1")
    assert bytes(session.row) == b"hi"
    session.template = None
    linnet("run", "m", "hello", "--max-new-tokens", "1")
    assert bytes(session.row) == b"hello"


def test_run_reads_standard_input(session):
    assert linnet("run", "m", "-", text="from a pipe").stdout == "FROM A PIPE\n"


def test_run_with_a_system_message(session):
    linnet("run", "m", "hi", "--system", "Be kind.")
    assert bytes(session.row).startswith(b"<s>Be kind.<u>hi<a>")
    raw = linnet("run", "m", "hi", "--system", "x", "--raw")
    assert raw.exit_code == 2
    assert "--system needs a chat template" in raw.stderr


def test_run_json_is_one_object(session):
    result = linnet("run", "m", "hi", "--json", "--stop", "I")
    shown = json.loads(result.stdout)
    assert {key: shown[key] for key in shown if key not in ("timings", "granted")} == {
        "text": "H",
        "tokens": [72, 73],
        "finish": "stop",
        "stopped_by": "I",
        "prompt_tokens": 8,
        "new_tokens": 2,
        "seed": None,
        "notes": ["it echoes"],
    }
    assert shown["granted"]["backend"] == "echo"
    assert 0 < shown["timings"]["first_token_s"] <= shown["timings"]["total_s"]


def test_run_verbose_tells_on_stderr(session):
    result = linnet("run", "m", "hi", "--verbose")
    assert result.stdout == "HI\n"
    assert "echo none, f32 on cpu, 1 threads, context 200" in result.stderr
    assert "note: it echoes" in result.stderr
    assert "the checkpoint suggests temperature 0.7; not applied" in result.stderr
    assert "8 prompt tokens, first token after" in result.stderr
    assert "3 new tokens, finish stop" in result.stderr


def test_run_options_reach_the_loader_and_the_program(session):
    where = ["--backend", "echo", "--mode", "none", "--dtype", "f32", "--device", "cpu"]
    limits = ["--max-seq", "50", "--threads", "2", "--max-new-tokens", "3"]
    result = linnet("run", "m", "hi", *where, *limits, "--temperature", "1", "--seed", "1")
    assert result.stdout == "???\n"
    _, options = session.loads[0]
    assert {name: options[name] for name in ("backend", "mode", "dtype", "device")} == {
        "backend": "echo",
        "mode": "none",
        "dtype": "f32",
        "device": "cpu",
    }
    assert (options["max_seq"], options["threads"]) == (50, 2)


@pytest.mark.parametrize("command", [["run", "m", "hi"], ["chat", "m"]])
def test_wrong_options_are_wrong_usage_before_loading(session, command):
    result = linnet(*command, "--top-p", "0")
    assert result.exit_code == 2
    assert "top_p is 0.0; it must be a number above 0, up to 1" in result.stderr
    assert session.loads == []


def test_a_prompt_that_does_not_fit_is_a_failure(session):
    result = linnet("run", "m", "x" * 300)
    assert isinstance(result.exception, RequestError)
    assert "has 306 tokens and the context 200" in str(result.exception)


def test_chat_remembers_resets_and_leaves(session):
    result = linnet("chat", "m", text="one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert (result.exit_code, result.stdout) == (0, "ONE\nTWO\nTHREE\n")
    assert bytes(session.row[: session.prompt]) == b"<u>three<a>"


def test_chat_sends_the_whole_conversation(session):
    linnet("chat", "m", "--system", "Hm.", text="one\ntwo\n")
    assert bytes(session.row[: session.prompt]) == b"<s>Hm.<u>one<a>ONE<u>two<a>"


def test_chat_interrupted_goes_on(session):
    session.interrupt_at = 2
    result = linnet("chat", "m", text="hello\nagain\n")
    assert (result.exit_code, result.stdout) == (0, "HE\nAGAIN\n")
    assert "stopped" in result.stderr
    assert bytes(session.row[: session.prompt]) == b"<u>hello<a>HE<u>again<a>"


def test_chat_out_of_context_says_how_to_go_on(session):
    result = linnet("chat", "m", text="x" * 250 + "\nhi\n")
    assert (result.exit_code, result.stdout) == (0, "HI\n")
    assert "has 256 tokens and the context 200" in result.stderr
    assert "/reset starts a new conversation" in result.stderr


def test_chat_without_a_template_names_the_other_command(session):
    session.template = None
    result = linnet("chat", "m")
    assert isinstance(result.exception, RequestError)
    assert "`linnet run m PROMPT --raw`" in str(result.exception)


def test_chat_verbose(session):
    assert "first token after" in linnet("chat", "m", "-v", text="hi\n").stderr

"""From a name to a model: which format, family, backend and context, and what is said of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from linnet.errors import CheckpointError, ConfigError, PluginError, RequestError, UnavailableError
from linnet.plugins.descriptors import API_VERSION, Backend, Capability, Family, Format
from linnet.plugins.interfaces import Granted, Probe
from linnet.runtime.load import DEFAULT_MAX_SEQ, bind, load
from linnet.spec.program import Program
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Checkpoint

GENERATES = frozenset({Capability.CACHE, Capability.CHOICE})


class Plugins:
    """A table of what is installed, and the implementations behind it."""

    def __init__(self):
        self.families, self.formats, self.backends = {}, {}, {}
        self.broken = ()
        self.targets = {}

    def implementation(self, descriptor):
        target = self.targets[descriptor.name]
        if isinstance(target, Exception):
            raise target
        return target

    def backend(self, name):
        if name not in self.backends:
            raise PluginError(f"there is no backend {name!r}")
        return self.backends[name]

    def format(self, name):
        raise PluginError(f'format {name!r} is not installed: pip install "linnet[{name}]"')

    def add_backend(self, name, priority=0, probe=None, capabilities=GENERATES):
        self.backends[name] = Backend(
            name,
            "x:Y",
            name,
            ("m",),
            ("cpu",),
            ("f32",),
            capabilities,
            priority=priority,
            api_version=API_VERSION,
        )
        self.targets[name] = FakeBackend(name, probe or Probe(True, "1.0"))


class FakeBackend:
    def __init__(self, name, probe):
        self.name = name
        self._probe = probe

    def probe(self):
        return self._probe

    def load(self, model, options):
        self.options = options
        granted = Granted(
            self.name, "m", "f32", "cpu", options.rows, options.max_seq, options.threads
        )
        return SimpleNamespace(granted=granted, close=lambda: None)


@pytest.fixture
def plugins(monkeypatch):
    plugins = Plugins()
    plugins.formats["plain"] = Format(
        "plain", "x:Y", (".plain",), ("*.plain",), api_version=API_VERSION
    )
    plugins.targets["plain"] = SimpleNamespace(
        open=lambda path: Checkpoint(path, "plain", {"model_type": path.stem}, {}, notes=("n1",))
    )
    plugins.families["bird"] = Family("bird", "x:Y", ("wren", "finch"), api_version=API_VERSION)
    plugins.most = 100

    def bind_bird(checkpoint):
        program = Program("bird", (), (), {}, {})
        return BoundModel(program, checkpoint, {}, 10, plugins.most, {}, notes=("n1", "n2"))

    plugins.targets["bird"] = SimpleNamespace(bind=bind_bird)
    plugins.add_backend("slow", priority=-1)
    monkeypatch.setattr("linnet.plugins.manager.plugin_manager", lambda: plugins)
    return plugins


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "wren.plain"
    path.touch()
    return path


def test_a_file_and_a_folder(plugins, model):
    assert bind(model).checkpoint.location == model
    plugins.targets["plain"].open = lambda path: Checkpoint(
        path, "plain", {"model_type": "finch"}, {}
    )
    assert bind(str(model.parent)).checkpoint.location == model.parent


def test_no_format(plugins, tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    for place in (path, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            bind(place)
        assert str(caught.value) == (
            f"{place} is not a checkpoint of any installed format; known: plain (.plain, *.plain)"
        )


def test_no_format_for_gguf_says_what_to_install(plugins, tmp_path):
    (tmp_path / "model.gguf").touch()
    for place in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(PluginError, match=r'pip install "linnet\[gguf\]"'):
            bind(place)


def test_two_formats(plugins, model):
    plugins.formats["other"] = Format("other", "x:Y", (), ("wren.*",), api_version=API_VERSION)
    with pytest.raises(CheckpointError, match="holds checkpoints of other, plain; name the file"):
        bind(model.parent)
    assert bind(model).checkpoint.format == "plain"


def test_an_unknown_family(plugins, tmp_path):
    path = tmp_path / "owl.plain"
    path.touch()
    with pytest.raises(ConfigError, match=r"model_type 'owl' of .*owl\.plain; known: finch, wren"):
        bind(path)
    plugins.broken = ("owls 1.0: ImportError",)
    with pytest.raises(ConfigError, match=r"broken plugin offers: owls 1.0: ImportError"):
        bind(path)


def test_the_backend_of_the_highest_priority(plugins, model):
    plugins.add_backend("b", priority=5)
    plugins.add_backend("a", priority=5)
    plugins.add_backend("forward", priority=9, capabilities=frozenset({Capability.FORWARD}))
    loaded = load(model)
    assert (loaded.granted.backend, loaded.notes) == ("a", ("n1", "n2"))


def test_a_backend_that_was_passed_over_is_told(plugins, model):
    plugins.add_backend("fast", priority=5, probe=Probe(False, "no CUDA driver"))
    plugins.add_backend("odd", priority=4)
    plugins.targets["odd"] = PluginError("backend 'odd' is broken")
    loaded = load(model)
    assert loaded.granted.backend == "slow"
    assert loaded.notes == (
        "n1",
        "n2",
        "not using the fast backend: no CUDA driver",
        "not using the odd backend: backend 'odd' is broken",
        "no faster backend can run here: slow does, slowly; "
        'pip install "linnet[torch]", or ask for it by name',
    )


def test_what_was_assumed_and_passed_over_is_reported(plugins, model):
    plugins.add_backend("fast", priority=5, probe=Probe(False, "no CUDA driver"))
    said = []
    loaded = load(model, report=said.append)
    assert said == [f"note: {line}" for line in loaded.notes]


def test_no_backend_at_all(plugins, model):
    plugins.add_backend("slow", probe=Probe(False, "no NumPy"))
    with pytest.raises(UnavailableError, match=r"generate here: not using the slow .*: no NumPy"):
        load(model)
    plugins.backends.clear()
    with pytest.raises(UnavailableError, match="no backend can generate here: none is installed"):
        load(model)


def test_the_backend_asked_for_or_none(plugins, model):
    plugins.add_backend("fast", priority=5)
    assert load(model, backend="slow").granted.backend == "slow"
    plugins.add_backend("fast", probe=Probe(False, "no CUDA driver; install one"))
    with pytest.raises(UnavailableError, match="fast backend is not available: no CUDA driver"):
        load(model, backend="fast")
    with pytest.raises(PluginError, match="there is no backend 'x'"):
        load("nowhere", backend="x")


def test_what_is_asked_reaches_the_backend(plugins, model):
    load(model, mode="m", dtype="f16", device="cuda", rows=3, max_seq=9, threads=2)
    options = plugins.targets["slow"].options
    assert (options.mode, options.dtype, options.device) == ("m", "f16", "cuda")
    assert (options.rows, options.max_seq, options.threads) == (3, 9, 2)
    assert options.numerics == "fast"


def test_the_default_context(plugins, model):
    assert load(model).granted.max_seq == 100
    for most, can in ((9000, "was made for 9000 positions"), (None, "states no longest context")):
        plugins.most = most
        loaded = load(model)
        assert loaded.granted.max_seq == DEFAULT_MAX_SEQ
        assert loaded.notes[-1] == (
            f"the model {can}; a cache row has 2048 (ask for more with max_seq)"
        )
    assert load(model, max_seq=5000).granted.max_seq == 5000


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_seq": 101}, UnavailableError, "max_seq is 101; it must be from 1 to 100"),
        ({"max_seq": 0}, UnavailableError, "max_seq is 0; it must be from 1 to 100"),
        ({"rows": 0}, UnavailableError, "rows is 0; it must be 1 or more"),
        ({"threads": 0}, RequestError, "threads is 0"),
        ({"numerics": "quick"}, UnavailableError, "numerics is 'quick'; it is 'fast' or 'exact'"),
    ],
)
def test_what_cannot_be(plugins, model, options, error, message):
    with pytest.raises(error, match=message):
        load(model, **options)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickle_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=r"is a pickle.*save_pretrained"):
            bind(path)

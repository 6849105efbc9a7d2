"""Hub repositories: a small Hub on this machine, one that is not there, one that never answers."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from linnet.errors import SourceError
from linnet.nest import hub
from linnet.nest.card import HubSource
from linnet.nest.sources import locate

COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "README.md": b"read me",
    "step-100/model.safetensors": b"older weights",
}


class Hub(BaseHTTPRequestHandler):
    """What snapshot_download asks for: a repository's files at a commit, and each of them."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        content, headers = b"", {}
        if self.path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in FILES.items()
            ]
            content = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith(f"/org/name/resolve/{COMMIT}/"):
            name = self.path.removeprefix(f"/org/name/resolve/{COMMIT}/")
            self.server.asked.add(name)
            content = FILES[name]
            headers = {
                "X-Repo-Commit": COMMIT,
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            }
        elif self.path != "/":
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "hub"


@pytest.fixture
def server(monkeypatch):
    from huggingface_hub import constants

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = set()
        at = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, at)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", at)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lay(cache, files, commit=COMMIT, branch="main"):
    """A snapshot in the Hub's cache, as it lies there."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, content in files.items():
        if "/" in name:
            continue
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / branch).write_text(commit)
    return snapshot


def test_a_repository_is_fetched_without_its_pickles(server, cache):
    lines = []
    folder = locate("org/name", report=lines.append)
    assert {path.name for path in folder.iterdir()} == server.asked
    assert server.asked == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert lines[-1] == f"org/name: snapshot {COMMIT[:12]}"
    assert hub.verify(folder) == []


def test_a_repository_without_weights_is_refused(server, monkeypatch):
    monkeypatch.delitem(FILES, "model.safetensors")
    with pytest.raises(SourceError, match=r"lacks config\.json"):
        locate("org/name", report=print)


def test_a_repository_that_is_not_there(server):
    with pytest.raises(SourceError, match="org/other"):
        locate("org/other", report=print)


def test_out_of_reach_the_cache_is_used_and_told(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    folder = lay(cache, FILES)
    lines = []
    assert locate("org/name", report=lines.append) == folder
    assert "cannot be reached" in lines[0]
    assert f"using the snapshot {COMMIT[:12]} of org/name in the cache" in lines[0]


def test_offline_the_cache_is_used(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"not in the Hub's cache .*HF_HUB_OFFLINE is set"):
        locate("org/name", report=print)
    folder = lay(cache, FILES)
    assert locate("org/name", report=print) == folder


def test_a_commit_in_the_cache_asks_nobody(cache):
    folder = lay(cache, FILES)
    lines = []
    assert locate(f"org/name@{COMMIT}", report=lines.append) == folder
    assert lines == [f"org/name: snapshot {COMMIT[:12]}, from the cache"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_half_a_snapshot_is_not_one(cache, missing):
    lay(cache, {name: content for name, content in FILES.items() if name != missing})
    assert hub.cached(HubSource("org/name")) is None


def test_shards_must_all_be_there(cache):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = {"config.json": b"{}", "tokenizer.model": b"x", "model-1.safetensors": b"1"}
    folder = lay(cache, files | {"model.safetensors.index.json": json.dumps(index).encode()})
    assert hub.cached(HubSource("org/name")) is None
    (folder / "model-2.safetensors").write_bytes(b"2")
    assert hub.cached(HubSource("org/name")) == folder


def test_verify_finds_a_changed_file(cache):
    folder = lay(cache, FILES)
    (folder / "notes.json").write_text("{}")
    assert hub.verify(folder) == ["notes.json"]
    (folder / "model.safetensors").resolve().write_bytes(b"weighty")
    with pytest.raises(SourceError, match=r"model\.safetensors has hash .* instead of"):
        hub.verify(folder)


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(SourceError, match="cannot be reached"):
            locate("org/name", report=print)


def test_the_environment_says_where_the_hub_is(tmp_path):
    """As a user meets it: a process of its own, with nothing to reach and nothing cached."""
    port = closed_port()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HUB_CACHE": str(tmp_path),
        "LINNET_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "linnet.cli.main", "nest", "fetch", "tinyllama-1.1b-chat"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"http://127.0.0.1:{port} cannot be reached" in done.stderr
    assert "linnet nest random tinyllama-1.1b-chat -o DIR" in done.stderr

"""The files of a site: whole, self-contained, escaped, and with their data beside them."""

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from linnet.bench.page.site import write_site
from linnet.errors import BenchError

FIXTURE = Path(__file__).parent / "data" / "smollm2-1.7b-h100.json"
NAME = "smollm2-1.7b-instruct"
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}&amp;"


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1][0] if self.tags else ""
        if tag in self.inline and self.cdata_elem == tag:
            self.inline[tag].append(data)
        self.text += data

    def values(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_site([FIXTURE], folder)
    return folder


def changed(tmp_path: Path, change: Any, name: str = "r.json") -> Path:
    data = json.loads(FIXTURE.read_text())
    change(data)
    (tmp_path / name).write_text(json.dumps(data))
    return tmp_path / name


def test_a_page_its_data_and_an_index(site: Path) -> None:
    assert sorted(path.name for path in site.iterdir()) == [
        "index.html", f"{NAME}.csv", f"{NAME}.html", f"{NAME}.json",
    ]  # fmt: skip
    assert (site / f"{NAME}.json").read_bytes() == FIXTURE.read_bytes()
    index = Elements((site / "index.html").read_text())
    assert f"{NAME}.html" in index.values("href")


def test_the_same_results_give_the_same_bytes(site: Path, tmp_path: Path) -> None:
    for path in write_site([FIXTURE], tmp_path):
        assert path.read_bytes() == (site / path.name).read_bytes()


def test_the_head_says_what_was_measured(site: Path) -> None:
    text = re.sub(r"\s+", " ", Elements((site / f"{NAME}.html").read_text()).text)
    for fact in (
        "SmolLM2 1.7B Instruct", "1.7B parameters", "llama", "Apache-2.0", "instruct",
        "NVIDIA H100 80GB HBM3", "512 prompt tokens, 128 new; median of 10 runs after 3 warm-ups",
        "256 of 128 to 512 prompt tokens and 128 new, at most 64 in flight",
        "linnet 0.1.0, torch 2.14.0", "driver 580.126.09", "2026-09-29 15:02 UTC",
    ):  # fmt: skip
        assert fact in text
    links = Elements((site / f"{NAME}.html").read_text()).values("href")
    assert "https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct" in links
    assert "https://arxiv.org/abs/2502.02737" in links


@pytest.mark.parametrize("name", ["index.html", f"{NAME}.html"])
def test_nothing_is_fetched_and_the_policy_says_so(site: Path, name: str) -> None:
    page = Elements((site / name).read_text())
    assert page.values("src") == []
    assert [attrs["href"] for tag, attrs in page.tags if tag == "link"] == ["data:,"]
    style = "".join(page.inline["style"])
    assert "@import" not in style
    assert "url(" not in style
    (policy,) = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    for inline in page.inline.values():
        digest = hashlib.sha256("".join(inline).encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)


def test_every_link_leads_somewhere(site: Path) -> None:
    page = Elements((site / f"{NAME}.html").read_text())
    ids = page.values("id")
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    for link in page.values("href"):
        if link.startswith("#"):
            assert link[1:] in ids, link
        elif not link.startswith(("https://", "data:")):
            assert (site / link).exists(), link
    for described in page.values("aria-describedby") + page.values("aria-labelledby"):
        assert described in ids
    for anchor in ("ttft_ms", "distance", "vllm:bf16", "ttft_ms:vllm:bf16", "optimum-onnx"):
        assert anchor in ids


def test_strangers_text_stays_text(tmp_path: Path) -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["machine"]["gpu"] = data["model"]["family"] = HOSTILE
        data["machine"]["system"] = data["machine"]["driver"] = HOSTILE
        data["model"]["name"] = f"../../{HOSTILE}/up"
        data["versions"][HOSTILE] = HOSTILE
        data["workload"]["serving"]["name"] = HOSTILE
        for row in data["rows"]:
            row["title"] = row["group"] = HOSTILE
            row["notes"] = [HOSTILE]
        data["rows"][0] |= {"metrics": {}, "error": HOSTILE}

    spoiled = write_site([changed(tmp_path, spoil)], tmp_path / "site")
    assert {path.parent for path in spoiled} == {tmp_path / "site"}
    clean = write_site([changed(tmp_path, lambda data: None, "c.json")], tmp_path / "clean")
    for ours, theirs in zip(spoiled, clean, strict=True):
        if ours.suffix != ".html":
            continue
        page, other = Elements(ours.read_text()), Elements(theirs.read_text())
        assert {tag for tag, _ in page.tags} <= {tag for tag, _ in other.tags} | {"details"}
        assert sum(tag == "script" for tag, _ in page.tags) == 1
        assert page.inline == other.inline
        names = {key for _, attrs in other.tags for key in attrs}
        assert {key for _, attrs in page.tags for key in attrs} <= names
        assert HOSTILE in page.text


def test_a_model_without_a_card_goes_by_its_folder(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda data: data["model"].update(name="/home/someone/My Model"))
    files = write_site([path], tmp_path / "site")
    assert {file.name for file in files} == {
        "index.html", "my-model.html", "my-model.csv", "my-model.json",
    }  # fmt: skip
    assert "/home/someone" not in (tmp_path / "site" / "index.html").read_text()
    assert "/home/someone" not in (tmp_path / "site" / "my-model.html").read_text()


def test_one_model_on_two_machines(tmp_path: Path) -> None:
    other = changed(tmp_path, lambda data: data["machine"].update(gpu="A <small> GPU"))
    write_site([FIXTURE, other], tmp_path / "site")
    found = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert found == {
        "index.html", f"{NAME}-nvidia-h100-80gb-hbm3.html", f"{NAME}-a-small-gpu.html",
    }  # fmt: skip


def test_one_model_twice_on_one_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"both hold smollm2.* on NVIDIA H100 80GB HBM3; give one"):
        write_site([FIXTURE, changed(tmp_path, lambda data: None)], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_results_of_nothing_and_of_failures_alone(tmp_path: Path) -> None:
    """A benchmark that was killed at once, and one in which nothing ran."""

    def fail(data: dict[str, Any]) -> None:
        for row in data["rows"]:
            row |= {"metrics": {}, "distance": None, "error": "no such engine"}

    for change in (lambda data: data.update(rows=[]), fail):
        write_site([changed(tmp_path, change)], tmp_path / "site")
        page = Elements((tmp_path / "site" / f"{NAME}.html").read_text())
        assert "numbers" in page.values("id")
        assert not {"claims", "ttft_ms"} & set(page.values("id"))
    assert "Did not run: no such engine" in page.text


def test_one_bad_file_leaves_nothing(tmp_path: Path) -> None:
    bad = changed(tmp_path, lambda data: data.update(rows=[{}]))
    with pytest.raises(BenchError, match=r"r\.json: rows\[0\]\.key is missing"):
        write_site([FIXTURE, bad], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_model_called_index_takes_no_page(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda data: data["model"].update(name="index"))
    files = {file.name for file in write_site([path], tmp_path / "site")}
    assert "index-nvidia-h100-80gb-hbm3.html" in files


def test_the_csv_has_every_row_and_no_formula(tmp_path: Path) -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["rows"][0]["title"] = "=HYPERLINK(1)"
        data["rows"][0]["notes"] = ["+1", "a"]

    write_site([changed(tmp_path, spoil)], tmp_path)
    found = list(csv.DictReader(io.StringIO((tmp_path / f"{NAME}.csv").read_text())))
    assert len(found) == 37
    first = found[0]
    assert (first["key"], first["title"], first["notes"]) == (
        "transformers", "'=HYPERLINK(1)", "'+1; a",
    )  # fmt: skip
    assert float(first["ttft_ms_median"]) == 15.8
    assert first["ttft_ms_min"] == ""
    by_key = {(row["key"], row["dtype"]): row for row in found}
    assert float(by_key["linnet-torch-cudagraphs", "bf16"]["ratio"]) == pytest.approx(491 / 188)
    assert by_key["linnet-tensorrt", "f16"]["standing"] == "wrong"
    assert by_key["vllm", "bf16"]["memory"] == "reserved"
    assert by_key["optimum-onnx", ""]["error"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "linnet", "page", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(tmp_path: Path) -> None:
    done = run(str(FIXTURE), "-o", str(tmp_path / "site"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'site' / 'index.html'}\n")
    done = run(str(FIXTURE), "-o", str(tmp_path / "site"), "--json")
    assert str(tmp_path / "site" / f"{NAME}.csv") in json.loads(done.stdout)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.json"), "-o", str(tmp_path / "site"))
    assert done.returncode == 1
    assert "none.json: cannot be read: No such file" in done.stderr
    assert run("-o", str(tmp_path)).returncode == 2
    (tmp_path / "file").write_text("")
    done = run(str(FIXTURE), "-o", str(tmp_path / "file"))
    assert done.returncode == 1
    assert "is a file; -o names a folder" in done.stderr

"""The benchmark page in a browser. ``nox -s page`` has what this needs: Playwright, axe, Chromium.

Pages are served from localhost, as a site is; one test opens them as files.
"""

import csv
import json
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from linnet.bench.page.site import write_site

CHROMIUM = os.environ.get("LINNET_CHROMIUM") or shutil.which("chromium")
WAY = "run nox -s page, with Chromium installed (apt-get install chromium, or LINNET_CHROMIUM=PATH)"
playwright = pytest.importorskip("playwright.sync_api", reason=f"needs Playwright: {WAY}")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=f"needs axe-core: {WAY}")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason=f"needs Chromium: {WAY}")

FIXTURE = Path(__file__).parents[1] / "linnet_core" / "tests" / "data" / "smollm2-1.7b-h100.json"
NAME = "smollm2-1.7b-instruct"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    other = json.loads(FIXTURE.read_text())
    other["model"]["name"] = "tinyllama-1.1b-chat"
    (folder / "other.json").write_text(json.dumps(other))
    write_site([FIXTURE, folder / "other.json"], folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    """Opens a page; whatever its console says, and any other host it asks, fails the test."""
    contexts, said = [], []

    def open_page(name: str = f"{NAME}.html", **options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": dict(zip(("width", "height"), SIZES["desktop"], strict=True)), **options}
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(address) else said.append(request.url),
        )
        page.goto(f"{address}/{name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in said if not text.startswith("data:,")] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["index.html", f"{NAME}.html"])
def test_themes_and_widths(opened: Any, name: str, size: str, scheme: str) -> None:
    """axe finds nothing, nothing is wider than the screen, and nothing moves while it loads."""
    width, height = SIZES[size]
    page = opened(name, viewport={"width": width, "height": height}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = int(paper.partition("(")[2].split(",")[0])
    assert brightness > 200 if scheme == "light" else brightness < 50
    shift = page.evaluate(
        """() => new Promise((done) => {
            let sum = 0;
            new PerformanceObserver((list) => list.getEntries().forEach((e) => sum += e.value))
                .observe({type: "layout-shift", buffered: true});
            setTimeout(() => done(sum), 300);
        })"""
    )
    assert shift == 0
    report = axe.Axe().run(page)
    assert report.violations_count == 0, report.generate_report()


def test_charts_are_the_results(opened: Any) -> None:
    """Every bar is as long, in pixels, as the number in the JSON file says."""
    rows = json.loads(FIXTURE.read_text())["rows"]
    expected = {
        f"{name}:{row['key']}:{row['dtype']}": metric["median"]
        for row in rows
        for name, metric in row["metrics"].items()
        if metric.get("memory") != "reserved"
    }
    page = opened()
    bars = page.evaluate(
        """() => [...document.querySelectorAll(".chart .bars:not(.log) .bar")].map((bar) => ({
            id: bar.id, value: Number(bar.dataset.value), cut: bar.classList.contains("cut"),
            width: bar.querySelector(".fill").getBoundingClientRect().width,
            shown: bar.querySelector(".value").innerText,
        }))"""
    )
    assert {bar["id"]: bar["value"] for bar in bars} == expected
    for name in ("ttft_ms", "decode_tok_s", "serve_tok_s", "load_s", "peak_bytes"):
        its = [bar for bar in bars if bar["id"].startswith(f"{name}:") and not bar["cut"]]
        longest = max(its, key=lambda bar: bar["value"])
        for bar in its:
            width = longest["width"] * bar["value"] / longest["value"]
            assert bar["width"] == pytest.approx(max(width, 2), abs=1), bar["id"]
    shown = {bar["id"]: bar["shown"].split("\n")[0] for bar in bars}
    assert shown["decode_tok_s:linnet-jax:bf16"].startswith("585 tok/s")
    assert "best" in shown["decode_tok_s:linnet-jax:bf16"]
    assert "too far off" in shown["decode_tok_s:linnet-tensorrt:f16"]


def test_the_keyboard_reaches_every_bar(opened: Any) -> None:
    page = opened()
    wanted = set(page.evaluate("[...document.querySelectorAll('.chart .bar')].map((b) => b.id)"))
    assert len(wanted) > 100
    reached: set[str] = set()
    for _ in range(600):
        page.keyboard.press("Tab")
        bar = page.evaluate(
            """() => {
                const bar = document.activeElement.closest(".chart .bar");
                return bar && [bar.id, getComputedStyle(bar.querySelector(".tip")).display];
            }"""
        )
        if bar:
            assert bar[1] == "block", f"{bar[0]} has the focus and no tooltip"
            reached.add(bar[0])
    assert reached == wanted


def test_tooltips_say_more_and_go_with_escape(opened: Any) -> None:
    page = opened()
    bar = page.locator('[id="decode_tok_s:linnet-tensorrt:f16"]')
    bar.hover()
    tip = bar.locator(".tip")
    assert tip.is_visible()
    assert "9.69, beyond the 2 that bf16 is allowed" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.locator("h1").hover()
    bar.hover()
    assert tip.is_visible()
    bar.locator("a").click()
    assert page.evaluate("location.hash") == "#linnet-tensorrt:f16"


def test_the_table_sorts_and_comes_back(opened: Any) -> None:
    rows = json.loads(FIXTURE.read_text())["rows"]
    found = [row["metrics"].get("decode_tok_s") for row in rows]
    speeds = [metric["median"] for metric in found if metric]
    page = opened()
    read = "[...document.querySelectorAll('#table tbody tr[id]')].map((row) => row.id)"
    values = """[...document.querySelectorAll('#table tbody tr[id]')].map(
        (row) => row.cells[3]?.dataset.v).filter((v) => v !== undefined).map(Number)"""
    before = page.evaluate(read)
    head = page.locator("thead th", has_text="Decode speed")
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert page.evaluate(values) == sorted(speeds, reverse=True)
    assert set(page.evaluate(read)) == set(before)
    last = "[...document.querySelectorAll('#table tbody tr[id]')].pop()"
    assert page.evaluate(f"{last}.cells[3]?.dataset.v ?? null") is None
    head.locator("button").click()
    assert page.evaluate(values) == sorted(speeds)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") is None
    assert page.evaluate(read) == before


def rows_of(site: Path) -> int:
    """Rows of the table, as the CSV beside it has them."""
    with (site / f"{NAME}.csv").open(newline="") as file:
        return len(list(csv.DictReader(file)))


def test_rows_can_be_filtered(opened: Any, site: Path) -> None:
    page = opened()
    page.locator("#filter").fill("linnet tensorrt")
    shown = page.locator("#table tbody tr[id]:visible")
    assert shown.count() == 3
    assert page.locator("#count").inner_text() == f"3 of {rows_of(site)} rows"
    page.locator("#filter").fill("")
    page.locator("[data-dtype-switch=bf16]").click()
    ids = page.evaluate(
        """[...document.querySelectorAll("#ttft_ms .bar")]
            .filter((bar) => bar.offsetHeight).map((bar) => bar.id)"""
    )
    assert {name.split(":")[2] for name in ids} == {"f32", "f16"}
    assert page.locator("#ttft_ms h4:visible").all_inner_texts() == ["ONNX RUNTIME AND TENSORRT"]


@pytest.mark.parametrize("kind", ["CSV", "JSON"])
def test_downloads_open(opened: Any, site: Path, tmp_path: Path, kind: str) -> None:
    page = opened()
    with page.expect_download() as download:
        page.locator(".tools a", has_text=kind).click()
    path = tmp_path / "download"
    download.value.save_as(path)
    assert path.read_bytes() == (site / f"{NAME}.{kind.lower()}").read_bytes()
    assert path.stat().st_size > 1000


def test_models_are_searched_and_filtered(opened: Any) -> None:
    page = opened("index.html")
    cards = page.locator(".card:visible h2")
    assert cards.all_inner_texts() == ["SmolLM2 1.7B Instruct", "TinyLlama 1.1B Chat v1.0"]
    page.locator("#search").fill("tiny h100")
    assert cards.all_inner_texts() == ["TinyLlama 1.1B Chat v1.0"]
    assert page.locator("#count").inner_text() == "1 of 2"
    page.locator("#search").fill("")
    page.locator("#family").select_option("llama")
    assert cards.count() == 2
    page.locator("[data-tag=instruct]").click()
    assert cards.all_inner_texts() == ["SmolLM2 1.7B Instruct"]
    page.locator(".card:visible h2 a").click()
    assert page.locator("h1").inner_text() == "SmolLM2 1.7B Instruct"


def test_everything_is_there_without_scripts(opened: Any, site: Path) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator(".chart .bar").first.is_visible()
    assert page.locator("#table tbody tr[id]:visible").count() == rows_of(site)
    assert page.locator(".js:visible").count() == 0
    page.locator('[id="ttft_ms:vllm:bf16"]').hover()
    assert page.locator('[id="tip:ttft_ms:vllm:bf16"]').is_visible()


def test_print_shows_rows_and_hides_tools(opened: Any) -> None:
    page = opened()
    page.emulate_media(media="print")
    assert page.locator(".tools:visible, nav:visible").count() == 0
    assert page.locator(".chart .bar").first.is_visible()
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")


def test_it_opens_as_a_file(browser: Any, site: Path) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto((site / "index.html").as_uri())
    page.locator(".card h2 a").first.click()
    page.locator("thead button").first.click()
    assert page.locator("thead th").first.get_attribute("aria-sort") == "ascending"
    assert said == []

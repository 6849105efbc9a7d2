"""Writing the site: a page for each results file, its data beside it, and an index over all.

Everything is inside the HTML: no file of another place is read, and the page's policy forbids it.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from linnet import __version__
from linnet.bench.page import catalogue, figures, intervals
from linnet.bench.page.charts import QUANTITIES, Chart, page_charts
from linnet.bench.page.claims import Claim, page_claims
from linnet.bench.page.download import table_csv
from linnet.bench.page.rows import PageRow, page_rows
from linnet.bench.schema import Results, parse_results, read_bytes
from linnet.errors import BenchError
from linnet.nest.card import Card, cards
from linnet.weights.safetensors import write_text

MEMORIES = {
    "resident": "resident",
    "driver": "driver",
    "allocator": "allocator",
    "reserved": "reserved pool",
}
COLUMNS = tuple(quantity for quantity in QUANTITIES if quantity.name != "distance")


@dataclass(frozen=True)
class Page:
    """One model on one machine: all that its HTML says."""

    slug: str
    source: bytes
    """The results file, as it is."""
    results: Results
    card: Card | None
    rows: list[PageRow]
    claims: list[Claim]
    charts: list[Chart]

    @property
    def title(self) -> str:
        """The model's name for people."""
        return self.card.title if self.card else self.model

    @property
    def model(self) -> str:
        """The model as it was named; of a folder its own name, without where it was."""
        return Path(self.results.model).name or self.results.model

    @property
    def machine(self) -> str:
        """What it ran on, in short."""
        machine = self.results.machine
        return machine.gpu or machine.cpu or "an unnamed machine"

    @property
    def groups(self) -> list[tuple[str, list[PageRow]]]:
        """The rows under their headings."""
        found: dict[str, list[PageRow]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return list(found.items())

    @property
    def reference(self) -> str:
        """The row that the others are compared with, in words."""
        key, dtype = self.results.reference
        found = [row.title for row in self.rows if (row.key, row.dtype) == (key, dtype)]
        return f"{found[0] if found else key} in {dtype}"

    @property
    def measured(self) -> list[PageRow]:
        """The rows that ran."""
        return [row for row in self.rows if row.standing != "failed"]

    @property
    def columns(self) -> list[str]:
        """The metrics that a row of this page has."""
        return [q.name for q in COLUMNS if any(row.metric(q.name) for row in self.rows)]


def make_page(source: bytes, name: str) -> Page:
    """The page of a results file's bytes. Raises BenchError for what is no results file."""
    results = parse_results(source, name)
    rows = page_rows(results)
    return Page(
        slug(Path(results.model).name),
        source,
        results,
        cards().get(results.model),
        rows,
        page_claims(rows),
        page_charts(rows),
    )


def slug(text: str) -> str:
    """What a text is called in a file name and a link."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:80] or "model"


def write_site(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write the pages of results files and their index into a folder; the files, index first.

    Every file is read and every page made before the first is written. Raises BenchError for a
    file that does not hold, and for two of one model on one machine.
    """
    pages = _named([make_page(read_bytes(path), str(path)) for path in paths], paths)
    environment = _environment()
    texts = {"index.html": render(environment, "index.html", pages=pages)}
    for page in pages:
        texts[f"{page.slug}.html"] = render(environment, "page.html", page=page, pages=pages)
        texts[f"{page.slug}.csv"] = table_csv(page.rows)
        texts[f"{page.slug}.json"] = page.source.decode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise BenchError(f"{folder} is a file; -o names a folder") from None
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _named(pages: Sequence[Page], paths: Sequence[Path]) -> list[Page]:
    """The pages with a name each: the model's, and the machine's where it was on several."""
    models = [page.slug for page in pages]
    named = [
        Page(**{**vars(page), "slug": f"{page.slug}-{slug(page.machine)}"})
        if models.count(page.slug) > 1 or page.slug == "index"
        else page
        for page in pages
    ]
    seen: dict[str, Path] = {}
    for page, path in zip(named, paths, strict=True):
        if page.slug in seen:
            raise BenchError(
                f"{seen[page.slug]} and {path} both hold {page.results.model} on {page.machine}; "
                "give one of them"
            )
        seen[page.slug] = path
    return sorted(named, key=lambda page: (page.title.lower(), page.slug))


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("linnet.bench.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "digits": figures.digits,
        "shown": lambda value, name: figures.shown(name, value),
        "size": figures.size,
        "percent": lambda share: f"{share * 100:.3f}%",
    }
    environment.globals |= {
        "bounds": catalogue.BOUNDS,
        "memories": MEMORIES,
        "quantities": {quantity.name: quantity for quantity in QUANTITIES},
        "restart": intervals.RESTART,
        "span": figures.span,
        "times": figures.times,
        "version": __version__,
    }
    return environment


def render(environment: Environment, template: str, **values: object) -> str:
    """A template with the style and script inside, and a policy that allows these two alone."""
    texts = files("linnet.bench.page") / "templates"
    inline = {name: (texts / name).read_text(encoding="utf-8") for name in ("style.css", "page.js")}
    sources = {
        name: "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
        for name, text in inline.items()
    }
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"script-src {sources['page.js']}; style-src-elem {sources['style.css']}; "
        "style-src-attr 'unsafe-inline'"
    )
    return environment.get_template(template).render(
        style=inline["style.css"],
        script=inline["page.js"],
        policy=policy,
        **values,
    )

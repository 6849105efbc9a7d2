"""The documents: links lead somewhere, and the Python in them runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (document.parent / target.split("#")[0]).exists(), f"{ids(document)}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_python_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    """The blocks of one document run in order in one namespace, from an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "document"}
    for number, block in enumerate(BLOCK.findall(document.read_text()), 1):
        exec(compile(block, f"{ids(document)}, block {number}", "exec"), namespace)

"""The guide to the program has every op, attribute and dtype, as it is in the code."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linnet.errors import SpecError
from linnet.spec import DType
from linnet.spec.composites import COMPOSITES
from linnet.spec.ops import CALLS, PRIMITIVES

GUIDE = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()
PRIMITIVE_PART = GUIDE.partition("## Primitives")[2].partition("\n## ")[0]
COMPOSITE_PART = GUIDE.partition("## Composites")[2].partition("\n## ")[0]


def primitive_rows() -> Iterator[str]:
    """A line of the table for each primitive."""
    for name, primitive in PRIMITIVES.items():
        attrs = ", ".join(f"`{attr}`" for attr in primitive.attrs)
        yield f"| `{name}` | {attrs} | {primitive.meaning} |".replace("|  |", "| |")


def composite_entries() -> Iterator[str]:
    """A paragraph for each composite: its signature without types, and its docstring."""
    for name, body in COMPOSITES.items():
        signature = inspect.signature(body)
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        called = signature.replace(parameters=bare, return_annotation=signature.empty)
        meaning = " ".join((body.__doc__ or "").split()).replace("``", "`")
        yield f"**`{name}{called}`** {meaning}"


@pytest.mark.parametrize("row", list(primitive_rows()), ids=list(PRIMITIVES))
def test_every_primitive_is_in_the_table_as_the_code_has_it(row: str) -> None:
    assert row in PRIMITIVE_PART


def test_no_other_primitive_is() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PRIMITIVE_PART, re.MULTILINE) == list(PRIMITIVES)


@pytest.mark.parametrize("entry", list(composite_entries()), ids=list(COMPOSITES))
def test_every_composite_is_explained_as_the_code_has_it(entry: str) -> None:
    assert entry in " ".join(COMPOSITE_PART.split())


def test_no_other_composite_is() -> None:
    assert re.findall(r"^\*\*`(\w+)\(", COMPOSITE_PART, re.MULTILINE) == list(COMPOSITES)


def test_calls_and_dtypes_are_all_there() -> None:
    for name, attrs in CALLS.items():
        assert f"`{name}` ({', '.join(f'`{attr}`' for attr in attrs)})" in GUIDE
    for dtype in DType:
        assert f"`{dtype}`" in GUIDE


def test_what_the_guide_prints_is_what_comes_out() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    family, printed, complaint, composite = blocks
    names: dict[str, Any] = {"__name__": "document"}
    exec(compile(family, "tiny.py", "exec"), names)
    for function in printed.strip().split("\n\n"):
        assert function in names["text"]

    wrong = family.replace("self.out = Linear(HIDDEN", "self.out = Linear(80")
    with pytest.raises(SpecError) as caught:
        exec(compile(wrong, "tiny.py", "exec"), {"__name__": "document"})
    assert f"SpecError: {caught.value}" == " ".join(complaint.split())

    exec(compile(composite, "relu.py", "exec"), names)
    del COMPOSITES["relu_squared"]

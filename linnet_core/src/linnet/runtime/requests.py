"""Checking what an entry is given, before any backend sees it: the same words everywhere.

Knows the entries of ``linnet.spec.decoder`` by the names of their inputs; an input by any other
name is checked for dtype and shape alone. Knows nothing of backends.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from linnet.errors import RequestError
from linnet.spec.program import CONTEXT, ROWS, Function, Program
from linnet.spec.types import Dim

if TYPE_CHECKING:
    from linnet.weights.checkpoint import Array

NUMPY_NAMES = {"i32": "int32", "f32": "float32"}
"""What NumPy calls the dtypes of inputs."""
LARGEST = {"temperature": (2 - 2**-23) * 2.0**127, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1.0}
"""The largest value of each option of sampling; of a temperature, the largest of f32."""


def check_inputs(
    program: Program,
    granted_rows: int,
    max_seq: int,
    vocab: int,
    entry: str,
    inputs: Mapping[str, "Array"],
) -> None:
    """Raise RequestError unless ``inputs`` are what ``entry`` takes.

    Every input is there and no other, of the right dtype and shape. Token ids are below
    ``vocab`` (those of padding and idle rows, too), cache rows are below ``granted_rows`` and
    differ, and nothing is written at or beyond position ``max_seq``.
    """
    if entry not in program.entries:
        raise RequestError(f"there is no entry {entry!r}; there are {', '.join(program.entries)}")
    function = program.entries[entry]
    _check_names(function, inputs)
    _check_shapes(function, inputs, {ROWS: granted_rows, CONTEXT: max_seq})

    if "tokens" in inputs:
        _between(entry, "tokens", inputs["tokens"], 0, vocab - 1, "token ids")
    if "rows" in inputs:
        rows = inputs["rows"].tolist()
        _between(entry, "rows", inputs["rows"], 0, granted_rows - 1, "cache rows")
        if len(set(rows)) < len(rows):
            raise RequestError(f"{entry}: rows {rows} name a cache row twice; give each once")
    if "starts" in inputs and "lengths" in inputs:
        starts, lengths = inputs["starts"], inputs["lengths"]
        longest = inputs["tokens"].shape[1] if "tokens" in inputs else max_seq
        _between(entry, "lengths", lengths, 1, longest, "numbers of tokens")
        _between(entry, "starts", starts, 0, max_seq - 1, "positions")
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if start + length > max_seq:
                raise RequestError(
                    f"{entry}: starts {start} + lengths {length} is over the {max_seq} positions "
                    "of a cache row; shorten the prompt, or load with a larger max_seq"
                )
    elif "positions" in inputs and inputs["positions"].max() >= max_seq:
        raise RequestError(
            f"{entry}: positions has {inputs['positions'].max()}, but a cache row has {max_seq} "
            "positions; stop there, or load with a larger max_seq"
        )
    _check_options(entry, inputs)


def _check_names(function: Function, inputs: Mapping[str, "Array"]) -> None:
    wanted = [value.name for value in function.inputs]
    if inputs.keys() == set(wanted):
        return
    missing = [name for name in wanted if name not in inputs]
    unknown = [name for name in inputs if name not in wanted]
    told = [
        f"{what} {', '.join(map(str, names))}"
        for what, names in (("misses", missing), ("does not take", unknown))
        if names
    ]
    raise RequestError(f"{function.name} {' and '.join(told)}; its inputs are {', '.join(wanted)}")


def _check_shapes(
    function: Function, inputs: Mapping[str, "Array"], known: Mapping[Dim, int]
) -> None:
    import numpy as np

    sizes: dict[Dim, int] = dict(known)
    for value in function.inputs:
        array, shape = inputs[value.name], value.type.shape
        what = f"{function.name}: {value.name}"
        if not isinstance(array, np.ndarray):
            raise RequestError(f"{what} is a {type(array).__name__}, not a NumPy array")
        if array.dtype != NUMPY_NAMES[value.type.dtype]:
            raise RequestError(f"{what} is {array.dtype}, not {NUMPY_NAMES[value.type.dtype]}")
        if array.ndim != len(shape):
            raise RequestError(f"{what} has the shape {array.shape}, not {_shape(shape)}")
        for axis, (dim, size) in enumerate(zip(shape, array.shape, strict=True)):
            want = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
            if size != want or size == 0:
                need = "1 or more" if size == want else want
                raise RequestError(
                    f"{what} has the shape {array.shape}, not {_shape(shape)}: axis {axis} is "
                    f"{size}, and must be {need}"
                )


def _shape(dims: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _between(entry: str, name: str, array: "Array", low: float, high: float, what: str) -> None:
    if low <= array.min() and array.max() <= high:  # false of NaN, too
        return
    wrong = ~((array >= low) & (array <= high))
    raise RequestError(
        f"{entry}: {name} has {array[wrong].flat[0]}; {what} are from {low} to {high}"
    )


def _check_options(entry: str, inputs: Mapping[str, "Array"]) -> None:
    """The options of sampling; an idle row may leave them all at zero."""
    for name, high in LARGEST.items():
        if name in inputs:
            _between(entry, name, inputs[name], 0, high, "values")

"""A loaded model: its generated module, weights and caches, and running entries.

Rows, starts and lengths are known here as numbers, before anything is on a device; from them
follows what spares the device work: how much of the cache is in use, whether rows are
neighbours, and whether they all start at one position and so need no mask.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Granted
from linnet.runtime.requests import check_inputs
from linnet.spec.paths import attribute
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet_torch.generated import load_module
from linnet_torch.source import Source
from linnet_torch.weights import DTYPES, read_weights

NAMES = {torch_dtype: dtype for dtype, torch_dtype in DTYPES.items()}


class TorchSession:
    """Runs the entries of a generated file, as they are: mode ``eager``."""

    def __init__(
        self,
        model: BoundModel,
        program: Program,
        source: Source,
        *,
        mode: str,
        dtype: DType,
        device: torch.device,
        rows: int,
        max_seq: int,
        threads: int,
        numerics: str,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._program, self._vocab, self._source = program, model.vocab, source
        self._device, self._threads = device, threads
        self._module: ModuleType | None = load_module(source.text, program.family)
        tensors = read_weights(program, model.parameters, dtype, device)
        self._tensors = tensors
        self._w: Any = self._module.nest({attribute(path): t for path, t in tensors.items()})
        self._state: Any = None
        if program.states:
            self._state = self._module.caches(rows, max_seq, dtype=DTYPES[dtype], device=device)
        dtypes = {tensor.dtype for tensor in tensors.values()}
        devices = {tensor.device for tensor in tensors.values()}
        self.granted = Granted(
            backend="torch",
            mode=mode,
            dtype=", ".join(str(NAMES[each]) for each in dtypes),
            device=", ".join(map(str, devices)),
            rows=rows,
            max_seq=max_seq,
            threads=torch.get_num_threads(),
            numerics=numerics,
            notes=notes,
        )

    def run(self, entry: str, inputs: Mapping[str, Array]) -> Array:
        """Run one entry. Logits come back as float32, tokens as int32, in memory of their own.

        Raises RequestError for inputs that are not what the entry takes.
        """
        if self._module is None:
            raise UnavailableError("this session is closed; load the model again")
        granted = self.granted
        check_inputs(self._program, granted.rows, granted.max_seq, self._vocab, entry, inputs)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode(), full_precision(self._device):
            return self._execute(entry, inputs).cpu().numpy()

    def _execute(self, entry: str, inputs: Mapping[str, Array]) -> torch.Tensor:
        """Run one entry on inputs that are known to fit it."""
        arrays, keywords, rows = plan(inputs)
        info = self._source.entries[entry]
        tensors: dict[str, Any] = {name: self._tensor(array) for name, array in arrays.items()}
        if rows is not None and info.rows_may_be_slice:
            tensors["rows"] = rows
        roots = [self._w] * info.weights + [self._state] * info.state
        given = {name: keywords[name] for name in info.keywords}
        if info.state and "starts" in arrays:
            self._forget(arrays)
        result: torch.Tensor = getattr(self._module, entry)(*roots, **tensors, **given)
        return result

    def _forget(self, arrays: Mapping[str, Array]) -> None:
        """Empty the rows that start anew, in f16.

        What overflowed there is infinite, and infinity reaches the next request through masks: a
        masked position counts 0 times, which is NaN of infinity.
        """
        if self.granted.dtype != "f16":
            return
        rows = [
            int(row)
            for row, start in zip(arrays["rows"], arrays["starts"], strict=True)
            if start == 0
        ]
        for state in self._program.states:
            cache = at(self._state, state.path)
            for row in rows:
                cache[row].zero_()

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def source(self) -> str:
        """The generated file."""
        return self._source.text

    def close(self) -> None:
        """Free weights and caches."""
        self._module = self._w = self._state = None
        self._tensors = {}
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def at(tree: Any, path: str) -> torch.Tensor:
    """The tensor at a path of a tree."""
    for name in path.split("."):
        tree = tree[int(name)] if name.isdecimal() else getattr(tree, name)
    return cast(torch.Tensor, tree)


def plan(inputs: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Any], slice | None]:
    """What the generated entries take beside their tensors, off the numbers.

    Returns the inputs, without columns that are padding in every row; ``start``, where every row
    starts there and has all its tokens, else None, and ``end``, one past the last position in use;
    and the cache rows as a slice, where they are neighbours in order.
    """
    arrays = dict(inputs)
    rows = None
    if "rows" in arrays:
        first, count = int(arrays["rows"][0]), len(arrays["rows"])
        if (arrays["rows"] == np.arange(first, first + count)).all():
            rows = slice(first, first + count)
    if "lengths" in arrays and "starts" in arrays:
        starts, lengths = arrays["starts"], arrays["lengths"]
        size = int(lengths.max())
        arrays["tokens"] = arrays["tokens"][:, :size]
        full = bool((lengths == size).all())
    elif "positions" in arrays:
        starts = arrays["positions"]
        lengths = np.ones_like(starts)
        full = bool((starts >= 0).all())
    else:
        return arrays, {}, rows
    alike = full and bool((starts == starts[0]).all())
    end = max(1, int((starts + lengths).max()))
    return arrays, {"start": int(starts[0]) if alike else None, "end": end}, rows


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products as the spec has them: f32 is f32, and what is narrower is summed in f32.

    These are switches of the whole process; they are put back.
    """
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    if device.type == "cuda":
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)
        if device.type == "cuda":
            matmul.allow_bf16_reduced_precision_reduction = before[0]
            matmul.allow_fp16_reduced_precision_reduction = before[1]

"""Binding: every parameter gets exactly one tensor that fits, and every tensor is used."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from linnet.errors import BindingError
from linnet.spec.program import Parameter, Program
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array, Checkpoint, StoredTensor
from linnet.weights.dtypes import finite_cast
from linnet.weights.encodings import Encodings, encoding_of


@dataclass(frozen=True)
class BoundParameter:
    """A parameter's values: ``read()`` gives them in the program's own layout and ``dtype``."""

    path: str
    shape: tuple[int, ...]
    dtype: DType
    read: Callable[[], Array] = field(repr=False, compare=False)
    stored: StoredTensor | None = None
    """The checkpoint's own tensor, where the file holds the values in another way."""


@dataclass(frozen=True)
class BoundModel:
    """A program with the checkpoint that fills it.

    ``parameters`` has an entry for every parameter of the program that is not tied; a tied one
    is found under the path it is tied to. ``describe`` is the typed config, for people;
    ``vocab`` and ``max_positions`` are what generation needs to know of it. ``notes`` are the
    family's own, beside those of the checkpoint.
    """

    program: Program
    checkpoint: Checkpoint
    parameters: Mapping[str, BoundParameter]
    vocab: int
    max_positions: int | None
    describe: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def read_parameter(
    parameter: Parameter, parameters: Mapping[str, BoundParameter], dtype: DType
) -> Array:
    """A stored parameter's values in ``dtype``, its parts one after the other where it has some.

    Raises CheckpointError for values that the dtype cannot hold, and for NaN or infinity.
    """
    parts = [finite_cast(parameters[path].read(), dtype, path) for path in parameter.tensors]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def matrix_dtype(model: BoundModel) -> DType:
    """The dtype that holds every matrix as it is stored: theirs where they share one, else F32.

    Vectors do not count: a GGUF file has them in f32 whatever its matrices are.
    """
    kinds = {p.dtype for p in model.parameters.values() if len(p.shape) > 1}
    return kinds.pop() if len(kinds) == 1 else DType.F32


def main_encoding(model: BoundModel) -> str:
    """What the file stores most of the model's numbers in: ``bf16``, ``q4_1``."""
    numbers: Counter[str] = Counter()
    for tensor in model.checkpoint.tensors.values():
        numbers[tensor.encoding or tensor.dtype.value] += prod(tensor.shape)
    return numbers.most_common(1)[0][0]


def stored_tensors(model: BoundModel) -> dict[str, StoredTensor]:
    """The checkpoint's own tensors, in the Transformers dialect and under its full names.

    What exporters carry over, where parameters are already in the spec's conventions. In the
    program's order. A tied head is left out, and so is what the family ignores.
    """
    return {
        path: replace(p.stored, name=path)
        if p.stored is not None
        else StoredTensor(path, p.shape, p.dtype, p.read)
        for path, p in model.parameters.items()
    }


_SHOWN = 8  # how many names of a kind an error lists


def bind_parameters(
    program: Program,
    checkpoint: Checkpoint,
    *,
    ignore: Sequence[str] = (),
    prefixes: Sequence[str] = ("",),
    encodings: Encodings = MappingProxyType({}),
) -> dict[str, BoundParameter]:
    """Every untied parameter's tensor, in stored dtype.

    ``ignore`` are patterns of tensor names that a family leaves unused on purpose. ``prefixes``
    are what a file may leave off every name: with ``("", "model.")`` a tensor ``norm.weight``
    can be the parameter ``model.norm.weight``; one prefix holds for the whole file. ``encodings``
    say which parameters the family's files hold otherwise than the program has them.

    Raises BindingError listing all that is missing, unused or of another shape.
    """
    wanted = {p.path: p for p in program.parameters if p.tied_to is None}
    tied = {p.path for p in program.parameters if p.tied_to is not None}
    names = {
        name
        for name in checkpoint.tensors
        if not any(re.fullmatch(pattern, name) for pattern in ignore)
    }
    prefix = max(prefixes, key=lambda p: len(wanted.keys() & {p + name for name in names}))
    found = {prefix + name: name for name in names}
    # A head's own name carries no prefix even in a file whose other names lack theirs.
    found |= {name: name for name in names if name in wanted or name in tied}
    used = {found[path] for path in (*wanted, *tied) if path in found}

    if not wanted.keys() & found.keys():
        raise BindingError(
            f"no tensor of {checkpoint.location} has a name that this family expects: it has "
            f"{_some(sorted(names)) or 'none'}; the family expects {_some(list(wanted))}"
        )
    tensors = {
        path: _decoded(path, checkpoint.tensors[found[path]], encodings)
        for path in wanted
        if path in found
    }
    missing = [path for path in wanted if path not in found]
    unused = sorted(names - used)
    vocab = checkpoint.config.get("vocab_size")
    misfits = [
        misfit
        for path, parameter in wanted.items()
        if path in found and (misfit := _misfit(parameter, tensors[path], vocab))
    ]
    problems = []
    if missing:
        problems.append(
            f"{len(missing)} missing: {_some(missing)}{_biases(missing, 'has', 'false')}"
        )
    if unused:
        problems.append(
            f"{len(unused)} not used: {_some(unused)}{_biases(unused, 'leaves out', 'true')}"
        )
    if misfits:
        problems.append(f"{len(misfits)} of the wrong shape or type: {_some(misfits)}")
    if problems:
        raise BindingError(
            f"the tensors of {checkpoint.location} do not fit its config: {'; '.join(problems)}"
        )
    return {
        path: BoundParameter(path, t.shape, t.dtype, t.read, checkpoint.tensors[found[path]])
        for path, t in tensors.items()
    }


def _decoded(path: str, tensor: StoredTensor, encodings: Encodings) -> StoredTensor:
    encoding = encoding_of(path, encodings)
    return tensor if encoding is None or not tensor.dtype.is_float else encoding.decode(tensor)


def _misfit(parameter: Parameter, tensor: StoredTensor, vocab: Any) -> str | None:
    """How a tensor differs from what the config makes of its parameter."""
    if not tensor.dtype.is_float:
        return f"{tensor.name} is {tensor.dtype}, not a float type"
    if tensor.shape == parameter.shape:
        return None
    hint = ""
    if tensor.shape == parameter.shape[::-1]:
        hint = " (it is transposed)"
    elif parameter.shape[:1] == (vocab,) and tensor.shape[1:] == parameter.shape[1:]:
        hint = " (is the vocabulary padded? then the config's vocab_size must count the padding)"
    return f"{tensor.name} is {list(tensor.shape)}, not {list(parameter.shape)}{hint}"


def _biases(names: Sequence[str], verb: str, flag: str) -> str:
    if not any(name.endswith(".bias") for name in names):
        return ""
    return f" (the config {verb} these biases: should attention_bias or mlp_bias be {flag}?)"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

"""Compiling a function of tensors ahead of time, once for each machine, and calling what came out.

A graph is exported, compiled by inductor (AOTInductor) and kept in the cache. A later start loads
it in milliseconds: nothing is traced, and no guards are checked on a call.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linnet_torch import cache

Function = Callable[[list[Tensor], list[Tensor]], tuple[Tensor, ...]]
"""Weights or caches first, then what changes from call to call."""


@dataclass(frozen=True)
class Graph:
    """A compiled function: ``call(fixed, given)`` with the tensors it was compiled for."""

    name: str
    compiled: bool
    """Whether it was compiled just now, rather than found in the cache."""
    run: Callable[[list[Tensor]], list[Tensor]]

    def __call__(self, fixed: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, in order."""
        return self.run([*fixed, *given])


def compile_graph(
    name: str,
    function: Function,
    fixed: Sequence[Tensor],
    given: Sequence[Tensor],
    *,
    free: Mapping[int, Mapping[int, Any]],
    facts: Mapping[str, Any],
    report: Callable[[str], None],
) -> Graph:
    """The graph of ``function(fixed, given)``, whose outputs are a tuple of tensors.

    ``free`` has the axes of ``given`` that may change, by place; every other size is fixed.
    ``facts`` are what the graph depends on besides PyTorch, the processor and the tensors' shapes.
    """
    shapes = [[str(t.dtype), str(t.device), *map(tuple, (t.shape, t.stride()))] for t in fixed]
    sizes = [[str(t.dtype), list(t.shape)] for t in given]
    moving = {
        str(place): {axis: str(dim) for axis, dim in axes.items()} for place, axes in free.items()
    }
    key = cache.key(
        **facts,
        name=name,
        fixed=shapes,
        given=[s if not moving.get(str(i)) else s[:1] for i, s in enumerate(sizes)],
        free=moving,
        threads=torch.get_num_threads(),
    )

    def build(path: Path) -> None:
        report(f"compiling {name}: once for this model and machine, a minute or less")
        _compile(function, list(fixed), list(given), free, path)

    path, compiled = cache.built(f"{name}-{key}.pt2", build)
    device = -1 if fixed[0].device.type == "cpu" else fixed[0].device.index
    # What torch._inductor.aoti_load_package calls, without importing the compiler: that takes a
    # second and 80 MB. Single-threaded, it waits for no event of its own, which a CUDA graph could
    # not record.
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, device)
    return Graph(name, compiled, loader.run)


def _compile(
    function: Function,
    fixed: list[Tensor],
    given: list[Tensor],
    free: Mapping[int, Mapping[int, Any]],
    path: Path,
) -> None:
    class Module(torch.nn.Module):
        def forward(self, fixed: list[Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
            return function(fixed, given)

    dynamic = ([None] * len(fixed), [dict(free.get(i, {})) or None for i in range(len(given))])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of what it calls itself
        exported = torch.export.export(
            Module(), (fixed, given), dynamic_shapes=dynamic, strict=False
        )
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))


class Replay:
    """A graph recorded as one CUDA graph: its inputs are copied in, its outputs stay in place."""

    def __init__(self, graph: Graph, fixed: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        self.given = [tensor.clone() for tensor in given]
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what libraries allocate once is allocated before recording
                graph(fixed, self.given)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = graph(fixed, self.given)

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, which the next call overwrites."""
        for place, tensor in zip(self.given, given, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return self.outputs

"""Modes ``inductor`` and ``cudagraphs``: a few compiled graphs that serve every request.

=========== ============================= =========================================================
graph       called for                    free sizes
=========== ============================= =========================================================
``decode``  a token for every row         none; on CUDA there is one for each extent of the caches
``prompt``  an empty row's first tokens   how many
``chunk``   tokens that go on in a row    how many, and how much of the row is in use
``forward`` logits of every position      how many
=========== ============================= =========================================================

Prompts go one after the other: each is a product of matrices by itself, and none is padded to the
length of another. Every graph gives the likeliest token beside the logits, so that the timed step
and the compared one are the same.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from linnet.errors import UnavailableError
from linnet.spec.passes.join import join_linears
from linnet.spec.passes.select import select_entries
from linnet.spec.paths import attribute
from linnet.spec.program import Function, Program
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet_torch import kernels
from linnet_torch.compiled import Graph, Replay, compile_graph
from linnet_torch.generated import load_module
from linnet_torch.helpers import sample
from linnet_torch.lowerings import CPU_PROMPT, CPU_STEP, CPU_STEP_MANY, PLAIN, Lowering
from linnet_torch.session import TorchSession, at
from linnet_torch.source import Source, generate
from linnet_torch.weights import DTYPES

log = logging.getLogger(__name__)

OPTIONS = ("seeds", "temperature", "top_k", "top_p", "min_p")
"""What the sampling entries take beside their step's inputs, in order."""
FIRST_EXTENT = 256
"""The shortest extent of the caches that a step on CUDA is compiled for; the others double it."""


def entries_of(program: Program, base: str) -> dict[str, Function]:
    """The entry, giving the likeliest token as well where the program can choose."""
    entry = program.entries[base]
    greedy = program.entries.get(f"{base}_greedy")
    if greedy is None:
        return {base: entry}
    both = dataclasses.replace(greedy, outputs=(*greedy.outputs, *entry.outputs))
    return {base: entry, greedy.name: both}


def lowerings(device: torch.device, dtype: torch.dtype, rows: int) -> tuple[Lowering, Lowering]:
    """How prompts and steps are written, by device and rows."""
    if device.type != "cpu":
        return PLAIN, PLAIN
    return CPU_PROMPT, CPU_STEP if rows <= kernels.few_rows(dtype) else CPU_STEP_MANY


class CompiledSession(TorchSession):
    """Runs a decoder's entries as compiled graphs; each is compiled when it is first needed."""

    def __init__(self, model: BoundModel, **options: Any) -> None:
        program = join_linears(model.program)
        missing = [name for name in ("forward", "extend", "decode") if name not in program.entries]
        if missing:
            raise UnavailableError(
                f"mode {options['mode']!r} compiles decoders; this program has no entry "
                f"{' or '.join(missing)}: use mode='eager'"
            )
        device, rows = options["device"], options["rows"]
        prompt, step = lowerings(device, DTYPES[options["dtype"]], rows)
        if device.type == "cpu":
            kernels.load()
        decode = select_entries(program, entries_of(program, "decode"))
        others = {**entries_of(program, "extend"), **entries_of(program, "forward")}
        self._step = generate(decode, lowering=step)
        self._prompt = generate(select_entries(program, others), lowering=prompt)
        super().__init__(model, program, self._prompt, **options)
        self._paths = [p.path for p in program.parameters if p.tied_to is None]
        self._fixed = [self._tensors[path] for path in self._paths]
        self._states = [state.path for state in program.states]
        self._caches = [at(self._state, path) for path in self._states]
        self._graphs: dict[str, Graph] = {}
        self._replays: dict[str, Replay] = {}

    @property
    def graphs(self) -> Mapping[str, bool]:
        """The graphs in use, each with whether it was compiled in this session."""
        return {name: graph.compiled for name, graph in self._graphs.items()}

    def source(self) -> str:
        """The file that steps are compiled from, then the one for prompts."""
        return f"{self._step.text}\n\n{self._prompt.text}"

    def close(self) -> None:
        """Free weights, caches and graphs."""
        self._fixed, self._caches, self._graphs, self._replays = [], [], {}, {}
        super().close()

    def _execute(self, entry: str, inputs: Mapping[str, Array]) -> Tensor:
        base, _, choice = entry.partition("_")
        if base == "decode":
            outputs = self._decode(inputs["tokens"], inputs["positions"])
        elif base == "extend":
            if self._device.type != "cpu":  # there a step reads the whole extent, under a mask
                self._forget(inputs)
            outputs = self._extend(inputs)
        elif entry == "forward":
            outputs = self._forward(inputs["tokens"])
        else:
            raise UnavailableError(
                f"mode {self.granted.mode!r} has no graph for the entry {entry!r}: use mode='eager'"
            )
        if choice == "greedy":
            return outputs[0]
        logits = outputs[-1]
        if not choice:
            return logits
        following = (
            inputs["positions"] + 1 if base == "decode" else inputs["starts"] + inputs["lengths"]
        )
        options = [self._tensor(inputs[name]) for name in OPTIONS]
        return sample(logits, self._tensor(following), *options)

    # --- steps -----------------------------------------------------------------------------------

    def _decode(self, tokens: Array, positions: Array) -> list[Tensor]:
        given = [self._tensor(tokens), self._tensor(positions)]
        name = self._step_for(int(positions.max()))
        fixed = [*self._fixed, *self._caches]
        if self.granted.mode != "cudagraphs":
            return self._graphs[name](fixed, given)
        if name not in self._replays:
            self._replays[name] = Replay(self._graphs[name], fixed, given)
        return self._replays[name](given)

    def _step_for(self, position: int) -> str:
        """The graph of a step whose furthest row is at the position, compiled if it was not."""
        end = self.granted.max_seq
        if self._device.type != "cpu":
            end = min(end, max(FIRST_EXTENT, 1 << position.bit_length()))
        name = "decode" if end == self.granted.max_seq else f"decode-{end}"
        if name not in self._graphs:
            given = [
                torch.zeros(self.granted.rows, dtype=torch.int32, device=self._device)
                for _ in range(2)
            ]
            self._graphs[name] = self._compile_step(name, given, end)
        return name

    # --- prompts ---------------------------------------------------------------------------------

    def _extend(self, inputs: Mapping[str, Array]) -> list[Tensor]:
        """One row after the other; the outputs of all, row by row."""
        rows = zip(*(inputs[name] for name in ("tokens", "rows", "starts", "lengths")), strict=True)
        results = [
            self._extend_row(tokens[:length], int(row), int(start))
            for tokens, row, start, length in rows
        ]
        return [torch.cat(outputs) for outputs in zip(*results, strict=True)]

    def _extend_row(self, tokens: Array, row: int, start: int) -> list[Tensor]:
        size = len(tokens)
        if size == 1:  # sizes of 1 are compiled as such: this is a step of one row
            every = np.zeros(self.granted.rows, np.int32)
            positions = np.full(self.granted.rows, -1, np.int32)
            every[row], positions[row] = tokens[0], start
            outputs = self._decode(every, positions)
            return [output[row : row + 1].clone() for output in outputs]
        views = [cache[row : row + 1, : start + size] for cache in self._caches]
        given = [
            *views,
            self._tensor(tokens[None]),
            self._tensor(np.array([start], np.int32)),
            self._tensor(np.array([size], np.int32)),
        ]
        name = "prompt" if start == 0 else "chunk"
        if name not in self._graphs:
            self._graphs[name] = self._compile_extend(name)
        self._step_for(start + size)  # compiled now, and not between the first token and the second
        return self._graphs[name](self._fixed, given)

    def _forward(self, tokens: Array) -> list[Tensor]:
        results = []
        for row in tokens:
            # A size of 1 is compiled as such; what comes after a token does not reach it.
            size = len(row)
            padded = np.append(row, row[-1:]) if size == 1 else row
            given = [self._tensor(padded[None])]
            if "forward" not in self._graphs:
                self._graphs["forward"] = self._compile_forward()
            outputs = self._graphs["forward"](self._fixed, given)
            results.append([output[:, :size] for output in outputs])
        return [torch.cat(outputs) for outputs in zip(*results, strict=True)]

    # --- compiling -------------------------------------------------------------------------------

    def _tree(self, module: Any, fixed: Sequence[Tensor]) -> Any:
        flat = dict(zip(self._paths, fixed, strict=True))
        for parameter in self._program.parameters:
            if parameter.tied_to is not None:
                flat[parameter.path] = flat[parameter.tied_to]
        return module.nest({attribute(path): tensor for path, tensor in flat.items()})

    def _compile_step(self, name: str, given: Sequence[Tensor], end: int) -> Graph:
        count = len(self._fixed)

        def function(fixed: list[Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
            module = load_module(self._step.text, self._program.family)
            state = module.nest(dict(zip(self._states, fixed[count:], strict=True)))
            step = getattr(module, _outputs_of(self._step, "decode"))
            return _tuple(step(self._tree(module, fixed[:count]), state, *given, end=end))

        return self._graph(name, self._step, function, [*self._fixed, *self._caches], given, {})

    def _compile_extend(self, name: str) -> Graph:
        """Sizes of the example are odd, and differ where they may: none is taken for another."""
        positions = self.granted.max_seq
        extent = min(47, positions)
        size = extent if name == "prompt" else max(2, extent - 14)
        views = [cache[:1, :extent] for cache in self._caches]
        # Tensors that are one and the same would be taken for one input.
        starts = torch.zeros(1, dtype=torch.int32, device=self._device)
        lengths = torch.zeros_like(starts)
        tokens = torch.zeros(1, size, dtype=torch.int32, device=self._device)
        sizes = Dim("S", min=2)
        reach = sizes if name == "prompt" else Dim("E", min=2)
        free = {place: {1: reach} for place in range(len(views))} | {len(views): {1: sizes}}

        def function(fixed: list[Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
            module = load_module(self._prompt.text, self._program.family)
            state = module.nest(dict(zip(self._states, given, strict=False)))
            tokens, starts, lengths = given[len(self._states) :]
            ends: dict[str, dict[str, Any]] = {
                "prompt": {"start": 0, "end": tokens.shape[1]},
                "chunk": {"start": None, "end": given[0].shape[1]},
            }
            extend = getattr(module, _outputs_of(self._prompt, "extend"))
            rows = slice(0, 1)
            weights = self._tree(module, fixed)
            return _tuple(extend(weights, state, tokens, rows, starts, lengths, **ends[name]))

        given = [*views, tokens, starts, lengths]
        return self._graph(name, self._prompt, function, self._fixed, given, free)

    def _compile_forward(self) -> Graph:
        def function(fixed: list[Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
            module = load_module(self._prompt.text, self._program.family)
            return _tuple(module.forward(self._tree(module, fixed), *given))

        tokens = torch.zeros(1, 33, dtype=torch.int32, device=self._device)
        free = {0: {1: Dim("S", min=2)}}
        return self._graph("forward", self._prompt, function, self._fixed, [tokens], free)

    def _graph(
        self,
        name: str,
        source: Source,
        function: Any,
        fixed: Sequence[Tensor],
        given: Sequence[Tensor],
        free: Mapping[int, Mapping[int, Any]],
    ) -> Graph:
        facts = {"source": source.text, "paths": self._paths, "kernels": kernels.source()}
        if self._device.type == "cuda":
            facts["gpu"] = torch.cuda.get_device_name(self._device)
        return compile_graph(
            name, function, fixed, given, free=free, facts=facts, report=log.warning
        )


def _outputs_of(source: Source, base: str) -> str:
    """The entry that gives the most: the token as well, where the program can choose."""
    return f"{base}_greedy" if f"{base}_greedy" in source.entries else base


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)

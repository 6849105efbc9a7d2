"""A loaded model in ONNX Runtime: one graph for prompt and step, its caches bound in place.

The caches come in and go out in the same memory, so that no call copies or makes one. A step's
inputs and outputs are bound once, and a call writes its numbers into them. Prompts go one row
after the other; rows without a token are left out of a step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Granted
from linnet.runtime.requests import check_inputs
from linnet.spec.program import CONTEXT
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet_onnx.graph import Graph
from linnet_onnx.models import Graphs
from linnet_onnx.runtime import ort_value, read_block, start_session
from linnet_onnx.writer import state_names

OPTIONS = ("seeds", "temperature", "top_k", "top_p", "min_p")


class Bound:
    """A step for some rows and tokens, with the arrays that it reads and writes."""

    def __init__(
        self, session: ort.InferenceSession, caches: Mapping[str, Array], shape: tuple[int, int],
        vocab: int,
    ) -> None:  # fmt: skip
        rows, length = shape
        self.inputs = {
            "tokens": np.zeros((rows, length), np.int32),
            "starts": np.zeros(rows, np.int32),
            "lengths": np.full(rows, length, np.int32),
        }
        self.outputs: dict[str, Array] = {
            "token": np.zeros(rows, np.int32),
            "logits": np.zeros((rows, vocab), np.float32),
        }
        self._session, self._binding = session, session.io_binding()
        for name, array in self.inputs.items():
            self._binding.bind_ortvalue_input(name, ort_value(array))
        for name, array in self.outputs.items():
            self._binding.bind_ortvalue_output(name, ort_value(array))
        for path, cache in caches.items():
            value = ort_value(cache)
            past, present = state_names(path)
            self._binding.bind_ortvalue_input(past, value)
            self._binding.bind_ortvalue_output(present, value)

    def run(self) -> None:
        """One call on what is in ``inputs``; the result is in ``outputs``."""
        self._session.run_with_iobinding(self._binding)


class OrtSession:
    """Runs a decoder's entries."""

    def __init__(self, model: BoundModel, granted: Granted) -> None:
        self._program, self._vocab = model.program, model.vocab
        graphs = Graphs(model, granted.dtype, granted.numerics, granted.max_seq)
        step = graphs.step()
        self._graphs, self._weights = graphs, read_block(step.graph.stored)
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._device, self._threads = granted.device, granted.threads
        self._step: ort.InferenceSession | None = self._start("step", step.graph)
        sizes = {"B": granted.rows, CONTEXT: granted.max_seq}
        pasts = {state_names(state.path)[0]: state.path for state in model.program.states}
        self._caches = {
            pasts[value.name]: np.zeros([sizes.get(d, d) for d in value.shape], np.float32)
            for value in self._step.get_inputs()
            if value.name in pasts
        }
        self._bound: dict[tuple[int, int], Bound] = {}
        provider = f"{self._step.get_providers()[0]}, ONNX Runtime {ort.__version__}"
        notes = tuple(f"in ONNX's own operators: {note}" for note in step.notes)
        self.granted = Granted(**{**vars(granted), "provider": provider, "notes": notes})

    def _start(self, name: str, graph: Graph) -> ort.InferenceSession:
        return start_session(
            graph, self._weights, name=name, device=self._device, threads=self._threads
        )

    def run(self, entry: str, inputs: Mapping[str, Array]) -> Array:
        """Run one entry. Logits come back as float32, tokens as int32, in memory of their own.

        Raises RequestError for inputs that are not what the entry takes.
        """
        if self._step is None:
            raise UnavailableError("this session is closed; load the model again")
        granted = self.granted
        check_inputs(self._program, granted.rows, granted.max_seq, self._vocab, entry, inputs)
        base, _, choice = entry.partition("_")
        if base == "forward":
            return self._forward(inputs["tokens"])
        name = "token" if choice == "greedy" else "logits"
        result = self._extend(name, inputs) if base == "extend" else self._decode(name, inputs)
        if choice != "sample":
            return result
        following = (
            inputs["positions"] + 1 if base == "decode" else inputs["starts"] + inputs["lengths"]
        )
        options = {name: inputs[name] for name in OPTIONS}
        return self._sample({"logits": result, "positions": following, **options})

    def _decode(self, name: str, inputs: Mapping[str, Array]) -> Array:
        """Neighbouring rows that have a token go together."""
        tokens, positions = inputs["tokens"], inputs["positions"]
        live = np.flatnonzero(positions >= 0)
        runs = np.split(live, np.flatnonzero(np.diff(live) > 1) + 1) if len(live) else []
        if len(runs) == 1 and len(live) == len(tokens):
            return self._decode_rows(0, len(tokens), tokens, positions)[name].copy()
        kind = (len(tokens),) if name == "token" else (len(tokens), self._vocab)
        result = np.zeros(kind, np.int32 if name == "token" else np.float32)
        for run in runs:
            rows = slice(int(run[0]), int(run[-1]) + 1)
            outputs = self._decode_rows(rows.start, rows.stop, tokens[rows], positions[rows])
            result[rows] = outputs[name]
        return result

    def _decode_rows(
        self, start: int, stop: int, tokens: Array, positions: Array
    ) -> dict[str, Array]:
        bound = self._bound.get((start, stop))
        if bound is None:
            bound = self._bound[start, stop] = self._bind(start, stop, 1)
        bound.inputs["tokens"][:, 0] = tokens
        bound.inputs["starts"][:] = positions
        bound.run()
        return bound.outputs

    def _extend(self, name: str, inputs: Mapping[str, Array]) -> Array:
        """One row after the other: none is padded to the length of another."""
        results = []
        rows = zip(*(inputs[k] for k in ("tokens", "rows", "starts", "lengths")), strict=True)
        for tokens, row, start, length in rows:
            bound = self._bind(int(row), int(row) + 1, int(length))
            bound.inputs["tokens"][0] = tokens[:length]
            bound.inputs["starts"][:] = start
            bound.run()
            results.append(bound.outputs[name])
        return np.concatenate(results)

    def _bind(self, start: int, stop: int, length: int) -> Bound:
        assert self._step is not None
        caches = {path: cache[start:stop] for path, cache in self._caches.items()}
        return Bound(self._step, caches, (stop - start, length), self._vocab)

    def _forward(self, tokens: Array) -> Array:
        logits: Array = self._session("forward").run(["logits"], {"tokens": tokens})[0]
        return logits

    def _sample(self, inputs: Mapping[str, Array]) -> Array:
        token: Array = self._session("sample").run(["token"], dict(inputs))[0]
        return token

    def _session(self, name: str) -> Any:
        """A session that few need, started when it is: it shares the weights."""
        if name not in self._sessions:
            graph = self._graphs.forward() if name == "forward" else self._graphs.sample()
            self._sessions[name] = self._start(name, graph)
        return self._sessions[name]

    def source(self) -> None:
        """It generates none."""

    def close(self) -> None:
        """Free weights, caches and sessions."""
        self._step = None
        self._weights, self._caches, self._bound, self._sessions = {}, {}, {}, {}

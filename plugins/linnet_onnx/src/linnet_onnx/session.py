"""A loaded model in ONNX Runtime: one graph for prompt and step, its caches bound in place.

The caches come in and go out in the same memory, so that no call copies or makes one. A step's
inputs are values on the device, bound once: a call copies its numbers into them. Prompts go one row
after the other; rows without a token are left out of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Granted
from linnet.runtime.requests import check_inputs
from linnet.spec.program import CONTEXT
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet_onnx.caches import Caches
from linnet_onnx.graph import Graph, dims
from linnet_onnx.models import Graphs
from linnet_onnx.pages import added, anonymous_memory, use_huge_pages
from linnet_onnx.runtime import Provider, ort_value, provider_of, start_session
from linnet_onnx.writer import present_name, state_names

OPTIONS = ("seeds", "temperature", "top_k", "top_p", "min_p")
Provide = Callable[[Graph, Mapping[str, Sequence[int]]], Provider]


BINDINGS = 16
"""Steps that stay bound: one for each run of neighbouring rows that had a token lately."""


class Bound:
    """A step for some rows and tokens, on inputs of its own and caches and outputs of the session.

    ``outputs`` are arrays on the host, which a call overwrites.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        caches: Caches,
        rows: slice,
        length: int,
        outputs: dict[str, Array],
        device: str,
    ) -> None:
        count = rows.stop - rows.start
        self.outputs = {name: array[:count] for name, array in outputs.items()}
        first = {
            "tokens": np.zeros((count, length), np.int32),
            "starts": np.zeros(count, np.int32),
            "lengths": np.full(count, length, np.int32),
        }
        # On the device: an array of the host would be copied there when it is bound, and no later
        # change of it would be seen.
        self._inputs = {name: ort_value(array, device=device) for name, array in first.items()}
        self._session, self._binding, self._caches = session, session.io_binding(), caches
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, array in self.outputs.items():
            self._binding.bind_ortvalue_output(name, ort_value(array))
        past, present = caches.rows(rows.start, rows.stop)
        for name in caches.names:
            self._binding.bind_ortvalue_input(name, past[name])
            self._binding.bind_ortvalue_output(present_name(name), present[name])

    def run(self, tokens: Array, starts: Array) -> dict[str, Array]:
        """One call on ``tokens[count, length]`` from ``starts[count]`` on: the outputs."""
        for name, array in (("tokens", tokens), ("starts", starts)):
            self._inputs[name].update_inplace(np.ascontiguousarray(array, np.int32))
        self._session.run_with_iobinding(self._binding)
        self._caches.turn()
        return self.outputs


class OrtSession:
    """Runs a decoder's entries.

    ``fused`` is whether the step is written in ONNX Runtime's own operators; ``provide`` gives the
    provider that runs a graph whose caches have these shapes; ``turns`` is whether it needs caches
    on two sides.
    """

    def __init__(
        self,
        model: BoundModel,
        granted: Granted,
        provide: Provide,
        *,
        fused: bool = True,
        turns: bool = False,
    ) -> None:
        self._program, self._vocab = model.program, model.vocab
        graphs = Graphs(model, granted.dtype, granted.numerics, granted.max_seq)
        step = graphs.step() if fused else graphs.plain_step()
        self._graphs = graphs
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._provider, self._threads = provider_of(granted.device), granted.threads
        sizes = {"B": granted.rows, CONTEXT: granted.max_seq}
        pasts = {state_names(state.path)[0] for state in model.program.states}
        shapes = {
            value.name or "": [sizes[d] if isinstance(d, str) else d for d in dims(value)]
            for value in step.graph.inputs
            if value.name in pasts
        }
        provider = provide(step.graph, shapes)
        on_cpu = granted.device == "cpu"
        before = anonymous_memory() if on_cpu else []
        self._step: ort.InferenceSession | None = self._start("step", step.graph, provider)
        huge = use_huge_pages(added(anonymous_memory(), before)) if on_cpu else 0
        kinds = {value.name: value.type for value in self._step.get_inputs()}
        self._caches = Caches(
            {name: (kinds[name], shape) for name, shape in shapes.items()},
            granted.device,
            turns=turns,
        )
        self._bound: dict[tuple[int, int, int], Bound] = {}
        self._outputs: dict[str, Array] = {
            "token": np.zeros(granted.rows, np.int32),
            "logits": np.zeros((granted.rows, model.vocab), np.float32),
        }
        name = f"{self._step.get_providers()[0]}, ONNX Runtime {ort.__version__}"
        notes = [f"in ONNX's own operators: {note}" for note in step.notes]
        if huge:
            notes.append(f"weights: {huge >> 20} MiB in huge pages")
        self.granted = replace(granted, provider=name, notes=(*granted.notes, *notes))

    def _start(
        self, name: str, graph: Graph, provider: Provider | None = None
    ) -> ort.InferenceSession:
        return start_session(
            graph, name=name, threads=self._threads, provider=provider or self._provider
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
        if positions.min() >= 0:
            return self._decode_rows(0, len(tokens), tokens, positions)[name].copy()
        live = np.flatnonzero(positions >= 0)
        runs = np.split(live, np.flatnonzero(np.diff(live) > 1) + 1) if len(live) else []
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
        key = (start, stop, self._caches.side)
        bound = self._bound.pop(key, None) or self._bind(start, stop, 1)
        self._bound[key] = bound  # the newest last
        if len(self._bound) > BINDINGS:
            del self._bound[next(iter(self._bound))]
        return bound.run(tokens[:, None], positions)

    def _extend(self, name: str, inputs: Mapping[str, Array]) -> Array:
        """One row after the other: none is padded to the length of another."""
        results = []
        rows = zip(*(inputs[k] for k in ("tokens", "rows", "starts", "lengths")), strict=True)
        for tokens, row, start, length in rows:
            bound = self._bind(int(row), int(row) + 1, int(length))
            outputs = bound.run(tokens[None, :length], start[None])
            results.append(outputs[name].copy())
        return np.concatenate(results)

    def _bind(self, start: int, stop: int, length: int) -> Bound:
        assert self._step is not None
        rows, device = slice(start, stop), self.granted.device
        return Bound(self._step, self._caches, rows, length, self._outputs, device)

    def _forward(self, tokens: Array) -> Array:
        logits: Array = self._session("forward").run(["logits"], {"tokens": tokens})[0]
        return logits

    def _sample(self, inputs: Mapping[str, Array]) -> Array:
        token: Array = self._session("sample").run(["token"], dict(inputs))[0]
        return token

    def _session(self, name: str) -> Any:
        """A session that few need, started when it is, on weights of its own."""
        if name in self._sessions:
            return self._sessions[name]
        if name == "sample":
            # Of logits that are on the host, in integers that other providers have no kernels for.
            session = self._start(name, self._graphs.sample(), provider_of("cpu"))
        else:
            session = self._start(name, self._graphs.forward())
        self._sessions[name] = session
        return session

    def source(self) -> None:
        """It generates none."""

    def close(self) -> None:
        """Free weights, caches and sessions."""
        self._step = None
        self._bound, self._sessions, self._outputs = {}, {}, {}
        self._caches = Caches({}, "cpu")

"""The reference backend: NumPy, canonical bodies, f32 or f64. Slow, exact, always there."""

from collections.abc import Mapping

import numpy as np

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Granted, LoadOptions, Probe
from linnet.reference.interpreter import Interpreter
from linnet.runtime.requests import check_inputs
from linnet.spec.program import CONTEXT, ROWS
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast, numpy_dtype

DTYPES = {"f32": DType.F32, "f64": DType.F64}


class ReferenceBackend:
    """Runs any program; it knows the primitives and nothing else."""

    def probe(self) -> Probe:
        """It needs what the core needs."""
        return Probe(True, f"NumPy {np.__version__}")

    def load(self, model: BoundModel, options: LoadOptions) -> "ReferenceSession":
        """Read every parameter into the dtype. Raises UnavailableError for what it has not."""
        name = options.dtype or "f32"
        if name not in DTYPES:
            raise UnavailableError(
                f"the reference backend computes in {' or '.join(DTYPES)}, not {name}"
            )
        if options.device not in (None, "cpu"):
            raise UnavailableError(
                f"the reference backend runs on the cpu, not on {options.device}"
            )
        if options.mode not in (None, "numpy"):
            raise UnavailableError(f"the reference backend has mode numpy, not {options.mode}")
        return ReferenceSession(model, options, name)


class ReferenceSession:
    """A model in NumPy arrays."""

    def __init__(self, model: BoundModel, options: LoadOptions, dtype: str) -> None:
        max_seq = options.max_seq or model.max_positions
        if max_seq is None:
            raise UnavailableError("this model states no longest sequence: give max_seq")
        kind = DTYPES[dtype]
        parameters = {
            path: cast(parameter.read(), kind, path) for path, parameter in model.parameters.items()
        }
        for parameter in model.program.parameters:
            if parameter.tied_to is not None:
                parameters[parameter.path] = parameters[parameter.tied_to]
        sizes = {ROWS: options.rows, CONTEXT: max_seq}
        states = {
            state.path: np.zeros(
                [sizes[d] if isinstance(d, str) else d for d in state.type.shape],
                numpy_dtype(kind),
            )
            for state in model.program.states
        }
        self._model = model
        self._interpreter: Interpreter | None = Interpreter(model.program, parameters, states, kind)
        self._threads = options.threads
        self.granted = Granted(
            backend="reference",
            mode="numpy",
            dtype=dtype,
            device="cpu",
            rows=options.rows,
            max_seq=max_seq,
            threads=options.threads,
            numerics="exact",
        )

    def run(self, entry: str, inputs: Mapping[str, Array]) -> Array:
        """One entry; logits as f32 even in an f64 run."""
        from threadpoolctl import threadpool_limits

        if self._interpreter is None:
            raise UnavailableError("this session is closed; load the model again")
        granted = self.granted
        check_inputs(
            self._model.program, granted.rows, granted.max_seq, self._model.vocab, entry, inputs
        )
        names = [value.name for value in self._model.program.entries[entry].inputs]
        with threadpool_limits(self._threads, user_api="blas"):
            (result,) = self._interpreter.run(entry, [inputs[name] for name in names])
        return result.astype(np.int32 if result.dtype.kind == "i" else np.float32)

    def source(self) -> None:
        """It generates none."""

    def close(self) -> None:
        """Drop the arrays."""
        self._interpreter = None

"""The JAX backend: what it can grant here, and loading a model into a session."""

from linnet_jax import environment  # isort: skip  (settles what JAX reads at its start)

import jax
from jaxlib.version import __version__ as jaxlib_version

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Granted, LoadOptions, Probe
from linnet.spec.passes.join import join_linears
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet_jax.compiler import SourceCompiler
from linnet_jax.session import Compiler, JaxSession
from linnet_jax.source import generate
from linnet_jax.weights import read_weights

MODES = ("jax", "stablehlo")
DEVICES = ("cpu", "cuda")
DTYPES = {"f32": DType.F32, "bf16": DType.BF16, "f16": DType.F16}


class JaxBackend:
    """Writes a program as JAX source, or as StableHLO, and runs that."""

    def probe(self) -> Probe:
        """JAX is imported with this module; its devices are found when a model is loaded."""
        return Probe(True, f"JAX {jax.__version__}; {', '.join(_platforms())}")

    def source(self, model: BoundModel, options: LoadOptions) -> str:
        """The source it would run for these options; reads no weights."""
        find_mode(options)
        return generate(join_linears(model.program), options.numerics, find_dtype(options))

    def load(self, model: BoundModel, options: LoadOptions) -> JaxSession:
        """Read the weights and make the caches.

        What is not asked for is the CPU and f32. Raises UnavailableError for what cannot be
        granted.
        """
        mode, dtype = find_mode(options), find_dtype(options)
        name = options.device or "cpu"
        if name.partition(":")[0] not in DEVICES:
            raise UnavailableError(f"the jax backend runs on {' or '.join(DEVICES)}, not {name!r}")
        threads, notes = environment.start(options.threads)
        device = find_device(name)
        max_seq = options.max_seq or model.max_positions
        if max_seq is None:
            raise UnavailableError("this model states no longest sequence: give max_seq")
        program = join_linears(model.program)
        compiler: Compiler
        if mode == "jax":
            compiler = SourceCompiler(program, options.numerics, dtype, device)
        else:
            from linnet_jax.stablehlo_compiler import ModuleCompiler

            compiler = ModuleCompiler(program, dtype, options.rows, max_seq, device)
        weights = read_weights(program, model.parameters, dtype, device)
        granted = Granted(
            backend="jax",
            mode=mode,
            dtype=_name_of(next(iter(weights.values()))),
            device=name,
            rows=options.rows,
            max_seq=max_seq,
            threads=threads,
            numerics=options.numerics,
            provider=f"XLA, jaxlib {jaxlib_version}",
            notes=notes,
        )
        return JaxSession(model, compiler, weights, device, granted)


def _platforms() -> list[str]:
    """The kinds of device there are, in our names, without starting any of them."""
    from importlib.util import find_spec

    plugin = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return ["cpu", *["cuda (its plugin is installed)"] * plugin]


def _name_of(array: jax.Array) -> str:
    return next(n for n, d in DTYPES.items() if str(array.dtype).startswith(_LONG[d]))


_LONG = {DType.F32: "float32", DType.BF16: "bfloat16", DType.F16: "float16"}


def find_mode(options: LoadOptions) -> str:
    """The mode, ``jax`` where none is asked for."""
    mode = options.mode or MODES[0]
    if mode not in MODES:
        raise UnavailableError(f"the jax backend has modes {', '.join(MODES)}, not {mode!r}")
    return mode


def find_dtype(options: LoadOptions) -> DType:
    """The dtype, f32 where none is asked for."""
    name = options.dtype or "f32"
    if name not in DTYPES:
        raise UnavailableError(f"the jax backend computes in {', '.join(DTYPES)}, not in {name!r}")
    return DTYPES[name]


def find_device(name: str) -> jax.Device:
    """The device by its name (``cpu``, ``cuda``, ``cuda:1``), if it is there."""
    kind, _, number = name.partition(":")
    if number and not number.isdecimal():
        raise UnavailableError(f"device {name!r} is not a kind and a number, as in cuda:1")
    try:
        devices = jax.devices("cpu" if kind == "cpu" else "gpu")
    except RuntimeError as error:
        raise UnavailableError(
            f"device {name!r} is not available: {str(error).splitlines()[0]}; use device='cpu', or "
            'pip install "jax[cuda13]"'
        ) from None
    index = int(number or 0)
    if index >= len(devices):
        raise UnavailableError(f"device {name!r} is not available: there are {len(devices)}")
    return devices[index]

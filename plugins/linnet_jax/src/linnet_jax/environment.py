"""What must be settled before JAX starts: memory, threads, and where compiled code is kept.

Imported before jax is. JAX reads these once in a process, so what a later session asks for and
cannot have any more is reported, never passed over.
"""

import functools
import os
import sys
from typing import Any

# JAX would take three quarters of a GPU's memory at its start.
if "jax" not in sys.modules:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from jax._src import xla_bridge

from linnet.nest.sources import cache_root
from linnet_jax.stablehlo_ops import FEW

_started: dict[str, int] = {}


def start(threads: int) -> tuple[int, tuple[str, ...]]:
    """Start JAX with so many threads if it has not been started; its threads, and notes."""
    notes = []
    if not xla_bridge.backends_are_initialized():
        before = os.environ.get("NPROC")
        os.environ["NPROC"] = str(threads)  # how XLA is told of a CPU budget
        try:
            jax.devices("cpu")
        finally:
            if before is None:
                del os.environ["NPROC"]
            else:
                os.environ["NPROC"] = before
        _started["threads"] = threads
        _keep_compiled()
    granted = _started.get("threads") or len(os.sched_getaffinity(0))
    if granted != threads:
        notes.append(f"threads {granted}, not {threads}: XLA was started with these")
    preallocate = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    notes.append(f"XLA_PYTHON_CLIENT_PREALLOCATE={preallocate}")
    return granted, tuple(notes)


def _keep_compiled() -> None:
    """Compiled code stays in Linnet's cache folder, unless the user named another."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        config.update("jax_compilation_cache_dir", str(cache_root() / "jax"))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        config.update("jax_persistent_cache_min_entry_size_bytes", -1)


WITHOUT_YNN: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""XLA's option, for one compilation: sums stay loops of its own, not calls of its YNN library."""


def spares_ynn(tokens: int, device: jax.Device) -> bool:
    """Whether a call of so many tokens is compiled with that option: its products are sums."""
    return tokens <= FEW and device.platform == "cpu" and _knows_option()


@functools.cache
def _knows_option() -> bool:
    """Whether this jaxlib knows the option; compiles next to nothing to find out."""
    try:
        jax.jit(lambda x: x).lower(0.0).compile(compiler_options=WITHOUT_YNN)
    except jax.errors.JaxRuntimeError:
        return False
    return True

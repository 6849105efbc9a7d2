"""The operators of ``kernels.cpp``, built with the user's compiler when they are first needed.

``linnet::linear`` and ``linnet::attend`` are for a few rows on a CPU; the C++ file says what they
compute. The built library lies in the cache, named after the source, PyTorch and the processor.
"""

import functools
import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from linnet.errors import UnavailableError
from linnet_torch import cache

FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared")

FEW_ROWS = {
    "AVX2": {torch.float32: 12, torch.bfloat16: 24, torch.float16: 24},
    "AVX512": {torch.float32: 8, torch.bfloat16: 7, torch.float16: 10},
}
"""Up to how many rows ``linnet::linear`` beats ``helpers.linear``, by what the processor has."""


def few_rows(dtype: torch.dtype) -> int:
    """Up to how many rows ``linnet::linear`` is taken; as with AVX-512 where nobody measured."""
    return FEW_ROWS.get(torch.backends.cpu.get_cpu_capability(), FEW_ROWS["AVX512"])[dtype]


def source() -> str:
    """The C++ file."""
    return files("linnet_torch").joinpath("kernels.cpp").read_text(encoding="utf-8")


@functools.cache
def load() -> None:
    """Make the operators known to PyTorch. Raises UnavailableError where they cannot be built."""
    compiler = _compiler()
    name = f"kernels-{cache.key(source=source(), compiler=_version(compiler), flags=FLAGS)}.so"
    path, _ = cache.built(name, lambda path: _build(compiler, path))
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    torch.library.register_fake("linnet::linear")(_fake_linear)
    torch.library.register_fake("linnet::attend")(_fake_attend)


def _compiler() -> str:
    """``$CXX``, else the first of the usual ones."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise UnavailableError(
        "no C++ compiler was found (g++ or clang++; $CXX names another): mode 'inductor' needs "
        "one on a CPU; install it, or use mode='eager'"
    )


def _version(compiler: str) -> str:
    run = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return run.stdout


def _build(compiler: str, path: Path) -> None:
    text = path.with_suffix(".cpp")
    text.write_text(source(), encoding="utf-8")
    root = Path(torch.__file__).parent
    command = [compiler, *FLAGS, f"-I{root / 'include'}", str(text), f"-L{root / 'lib'}"]
    command += ["-ltorch", "-ltorch_cpu", "-o", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr]
        raise UnavailableError(
            f"{compiler} could not build Linnet's operators: {errors[0].strip()}; use mode='eager'"
        )


def _fake_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _fake_attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int | None = None
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)

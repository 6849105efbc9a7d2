"""Mode ``jax``: the generated file, each entry jitted with its caches donated."""

from collections.abc import Sequence
from typing import Any

import jax

from linnet.spec.paths import attribute
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array
from linnet_jax.environment import WITHOUT_YNN, spares_ynn
from linnet_jax.generated import load_module
from linnet_jax.session import Arrays, Step
from linnet_jax.source import generate, stored


class SourceCompiler:
    """Compiles entries of the generated file ahead of time.

    Weights and states cross as lists, in the order of the program: that is faster for each call
    than a tree.
    """

    def __init__(self, program: Program, numerics: str, dtype: DType, device: jax.Device) -> None:
        self.text = generate(program, numerics, dtype)
        self._module: Any = load_module(self.text, program.family)
        vars(self._module)["PLATFORM"] = device.platform
        self._device = device
        self._ties = {p.path: p.tied_to for p in program.parameters if p.tied_to is not None}
        self._weights = [attribute(path) for path in stored(program)]
        self._states = [state.path for state in program.states]

    def compile(
        self, entry: str, weights: Arrays, states: Arrays, inputs: Sequence[Array], end: int | None
    ) -> Step:
        """One entry for these shapes."""
        function, nest = getattr(self._module, entry), self._module.nest

        def run(weights: Arrays, states: Arrays, inputs: Sequence[jax.Array]) -> Any:
            flat = dict(zip(self._weights, weights, strict=True))
            w = nest(flat | {path: flat[other] for path, other in self._ties.items()})
            if end is None:
                return function(w, *inputs), states
            tree = nest(dict(zip(self._states, states, strict=True)))
            result, tree = function(w, tree, *inputs, end=end)
            return result, [at(tree, path) for path in self._states]

        spare = spares_ynn(inputs[0].size, self._device)
        vars(self._module)["YNN"] = not spare
        jitted = jax.jit(run, donate_argnums=(1,), keep_unused=True)
        with jax.default_device(self._device):
            compiled = jitted.lower(weights, states, inputs).compile(
                compiler_options=WITHOUT_YNN if spare else None
            )
        return Step(compiled.runtime_executable(), self._device)


def at(tree: Any, path: str) -> jax.Array:
    """The array at a path of a tree."""
    for name in path.split("."):
        tree = tree[int(name)] if name.isdecimal() else getattr(tree, name)
    return tree  # type: ignore[no-any-return]

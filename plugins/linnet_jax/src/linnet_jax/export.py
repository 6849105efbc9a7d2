"""The StableHLO exporter: portable modules, and the weights that they take beside them.

One module for each entry at fixed sizes, as MLIR text and as StableHLO's portable bytecode, which
other versions of XLA read. ``manifest.json`` says what each takes and gives, in order.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlib.mlir.dialects import stablehlo

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Artifact
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet.weights.dtypes import cast
from linnet.weights.paths import new_folder
from linnet.weights.safetensors import Entry, write_file, write_text
from linnet_jax.stablehlo import Sizes, state_dtype, write_module

DTYPES = {"f32": DType.F32, "bf16": DType.BF16, "f16": DType.F16}
DEFAULTS = {"dtype": "f32", "rows": 1, "max_seq": 2048, "prompt": 512, "platform": "cpu"}
ENTRIES = ("forward", "extend", "extend_greedy", "decode", "decode_greedy")


class StableHLOExporter:
    """Writes ``NAME.mlir`` and ``NAME.mlirbc`` for each entry, and ``weights.safetensors``.

    Options: ``dtype``; ``rows`` and ``max_seq``, the caches' sizes; ``prompt``, how many tokens
    ``forward`` and ``extend`` take; ``platform``, ``cpu`` or ``cuda``, which decides how few rows
    are multiplied and not whether the modules run elsewhere.
    """

    def export(self, model: BoundModel, folder: Path, options: Mapping[str, Any]) -> Artifact:
        """Write ``folder`` whole, or not at all, reading one tensor at a time.

        Raises UnavailableError for options that there are none or that do not fit,
        CheckpointError for values that the dtype cannot hold.
        """
        given = _options(model, options)
        dtype = DTYPES[given["dtype"]]
        entries = [
            Entry(path, dtype, p.shape, lambda path=path, p=p: cast(p.read(), dtype, path))  # type: ignore[misc]
            for path, p in model.parameters.items()
        ]
        with new_folder(folder) as beside:
            write_file(beside / "weights.safetensors", entries)
            manifest: dict[str, Any] = {"schema": 1, **given, "entries": {}}
            for entry in (name for name in ENTRIES if name in model.program.entries):
                sizes = _sizes(model, entry, dtype, given)
                text = write_module(model.program, entry, sizes)
                write_text(beside / f"{entry}.mlir", text)
                version = stablehlo.get_minimum_version()
                code = stablehlo.serialize_portable_artifact_str(text, version)
                (beside / f"{entry}.mlirbc").write_bytes(code)
                manifest["entries"][entry] = _describe(model, entry, sizes)
                manifest["stablehlo"] = version
            write_text(beside / "manifest.json", json.dumps(manifest, indent=2) + "\n")
            names = sorted(path.name for path in beside.iterdir())
        return Artifact(folder, tuple(folder / name for name in names))


def _options(model: BoundModel, options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise UnavailableError(
            f"the stablehlo exporter has no option {', '.join(unknown)}; it has "
            f"{', '.join(DEFAULTS)}"
        )
    given: dict[str, Any] = {**DEFAULTS, **options}
    if given["dtype"] not in DTYPES:
        raise UnavailableError(
            f"the stablehlo exporter writes {', '.join(DTYPES)}, not {given['dtype']!r}"
        )
    if given["platform"] not in ("cpu", "cuda"):
        raise UnavailableError(f"platform is cpu or cuda, not {given['platform']!r}")
    for name in ("rows", "max_seq", "prompt"):
        text = str(given[name])
        if not text.isdecimal() or not int(text):
            raise UnavailableError(f"{name} is {given[name]!r}, not a number from 1 on")
        given[name] = int(text)
    if model.max_positions is not None and "max_seq" not in options:
        given["max_seq"] = min(given["max_seq"], model.max_positions)
    if "prompt" not in options:
        given["prompt"] = min(given["prompt"], given["max_seq"])
    if given["prompt"] > given["max_seq"]:
        raise UnavailableError(
            f"a prompt of {given['prompt']} does not fit {given['max_seq']} positions (max_seq)"
        )
    return given


def _sizes(model: BoundModel, entry: str, dtype: DType, given: Mapping[str, Any]) -> Sizes:
    known = {"B": 1, "S": given["prompt"], "R": given["rows"]}
    shapes = {
        value.name: tuple(known[d] if isinstance(d, str) else d for d in value.type.shape)
        for value in model.program.entries[entry].inputs
    }
    end = None if entry == "forward" else given["max_seq"]
    return Sizes(dtype, given["rows"], given["max_seq"], end, shapes, given["platform"])


def _describe(model: BoundModel, entry: str, sizes: Sizes) -> dict[str, Any]:
    """What the module takes after the weights, and gives, in order."""
    program = model.program
    states = [] if sizes.end is None else [state.path for state in program.states]
    inputs = program.entries[entry].inputs
    return {
        "weights": [p.path for p in program.parameters if p.tied_to is None],
        "states": states,
        "state_dtype": str(state_dtype(sizes.dtype, sizes.platform)),
        "inputs": [
            {"name": v.name, "dtype": str(v.type.dtype), "shape": list(sizes.shapes[v.name])}
            for v in inputs
        ],
        "results": ["logits" if entry in ("forward", "extend", "decode") else "tokens", *states],
    }

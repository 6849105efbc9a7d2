"""ONNX Runtime, running an exported folder as its readers would, asked for logits and token ids.

A script for any environment that has ONNX Runtime: it imports nothing of Linnet. Logits are those
of ``forward``; that prompt and step, with their caches, say the same of the last token is held
here, too.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

TYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32}


class Graph:
    """A graph of the folder."""

    def __init__(self, folder: Path, name: str, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(
            folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"]
        )
        self.outputs = [output.name for output in self.session.get_outputs()]

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Outputs by name, of those inputs that the graph has."""
        known = {value.name for value in self.session.get_inputs()}
        feed = {name: array for name, array in inputs.items() if name in known}
        return dict(zip(self.outputs, self.session.run(None, feed), strict=True))


def cached(folder: Path, manifest: dict[str, Any], tokens: Any, threads: int) -> Any:
    """Logits ``[V]`` of the last token: all others as a prompt, then one step."""
    names = ("step", "step") if manifest["dialect"] == "ort" else ("extend", "decode")
    prompt = Graph(folder, names[0], threads)
    step = prompt if names[0] == names[1] else Graph(folder, names[1], threads)
    count = tokens.shape[1]
    sizes = {"B": 1, "R": 1, "T": count}
    state = {
        value["name"]: np.zeros([sizes.get(d, d) for d in value["shape"]], TYPES[value["dtype"]])
        for value in manifest["graphs"][names[0]]["inputs"]
        if value["name"].startswith("past.")
    }
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    inputs = {"tokens": tokens[:, :-1], "rows": zero, "starts": zero, "lengths": one * (count - 1)}
    if count > 1:
        outputs = prompt.run({**inputs, **state})
        state = {name: outputs["present." + name.removeprefix("past.")] for name in state}
    last = tokens[:, -1:] if names[1] == "step" else tokens[:, -1]
    at = one * (count - 1)
    inputs = {"tokens": last, "starts": at, "positions": at, "lengths": one}
    return step.run({**inputs, **state})["logits"][0]


def main(folder: Path) -> None:
    """Answer ``request.json``."""
    request = json.loads((folder / "request.json").read_text())
    model = Path(request["model"])
    manifest = json.loads((model / "linnet-onnx.json").read_text())
    tokens = np.array([request["tokens"]], np.int32)
    logits = Graph(model, "forward", request["threads"]).run({"tokens": tokens})["logits"][0]
    last = cached(model, manifest, tokens, request["threads"])
    off = float(np.abs(last - logits[-1]).max())
    scale = float(np.abs(logits[-1]).max())
    if not off <= {"f32": 1e-3, "f16": 1e-2}.get(manifest["dtype"], 5e-2) * max(1.0, scale):
        sys.exit(f"prompt and step are {off:g} away from forward, in logits of {scale:g}")
    np.savez(folder / "answer.npz", logits=logits)
    ids = []
    if request["texts"]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        ids = [tokenizer.encode(text).ids for text in request["texts"]]
    versions = f"onnxruntime {ort.__version__}, {manifest['dtype']}, {manifest['dialect']}"
    (folder / "answer.json").write_text(json.dumps({"versions": versions, "ids": ids}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

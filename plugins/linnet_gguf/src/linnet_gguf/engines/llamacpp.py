"""llama.cpp through ``xllamacpp``, asked for log-probabilities and token ids.

A script for that package's own environment: it imports nothing of Linnet. Its server speaks HTTP
on the loopback address, and lists the likeliest tokens after a prompt; one position is asked for
after the other, each reusing what was computed for the last.
"""

import json
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

LISTED = 1024


def main(folder: Path) -> None:
    """Answer ``request.json``."""
    request = json.loads((folder / "request.json").read_text())
    tokens = request["tokens"]
    parameters = xllamacpp.CommonParams()
    parameters.model.path = request["model"]
    parameters.n_ctx = len(tokens) + 8
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.cpuparams.n_threads = request["threads"]
    parameters.warmup = False
    server = xllamacpp.Server(parameters)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        message = urllib.request.Request(
            server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(message) as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    # What is chosen must be text: nothing is said of an end, nor of part of a character. Choosing
    # comes after the probabilities.
    letter = post("/tokenize", {"content": "a"})["tokens"][-1]
    rows = []
    for end in range(1, len(tokens) + 1):
        answer = post(
            "/v1/completions",
            {
                "prompt": tokens[:end],
                "n_predict": 1,
                "temperature": 0,
                "n_probs": LISTED,
                "cache_prompt": True,
                "logit_bias": [[letter, 1000]],
            },
        )
        (token,) = answer["choices"][0]["logprobs"]["content"]
        rows.append([(top["id"], top["logprob"]) for top in token["top_logprobs"]])
    shortest = min(map(len, rows))
    listed = np.array([row[:shortest] for row in rows], np.float64)
    np.savez(
        folder / "answer.npz",
        ids=listed[..., 0].astype(np.int64),
        logprobs=listed[..., 1].astype(np.float32),
    )
    ids = [
        post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        for text in request["texts"]
    ]
    answer = {"versions": f"xllamacpp {version('xllamacpp')}", "ids": ids}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

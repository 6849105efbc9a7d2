"""Stands in for Text Generation Inference, which cannot run here: its launcher's options, its HTTP.

It answers in TGI's wire format from a table of random logits: what follows depends on the number of
tokens so far. What is tested with it is our side: options, stream, counts, ends and faults.
"""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

parser = argparse.ArgumentParser()
for option in ("model-id", "dtype", "hostname", "shard-uds-path", "usage-stats"):
    parser.add_argument(f"--{option}")
for option in (
    *("port", "num-shard", "max-input-tokens", "max-total-tokens"),
    *("max-concurrent-requests", "max-top-n-tokens"),
):
    parser.add_argument(f"--{option}", type=int)
options = parser.parse_args()
folder = Path(options.model_id)
if not (folder / "tokenizer.json").exists():
    sys.exit("Error: no tokenizer.json")
tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
table = np.random.default_rng(0).normal(size=(4096, 131)) * 3
END = 2
"""It is chosen where the last of the prompt's ids is 9: a text that ends at once."""


def top(position: int, count: int) -> list[dict[str, Any]]:
    logits = table[position]
    logprobs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logprobs)[: max(count, 1)]
    return [
        {"id": int(i), "text": str(i), "logprob": float(logprobs[i]), "special": False}
        for i in order
    ]


class Handler(BaseHTTPRequestHandler):
    def send(self, content: Any) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send({})
        elif self.path == "/info":
            about = {"version": "3.3.5", "model_dtype": options.dtype, "model_device_type": "cuda"}
            self.send(about)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        parameters = request["parameters"]
        ids = tokenizer.encode(request["inputs"]).ids
        assert request["stream"] and len(ids) <= options.max_input_tokens
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        wanted = 1 if ids[-1] == 9 else parameters["max_new_tokens"]
        for step in range(wanted):
            listed = top(len(ids) + step, parameters.get("top_n_tokens") or 0)
            event = {"index": step + 1, "token": listed[0], "generated_text": None, "details": None}
            if parameters.get("top_n_tokens"):
                event["top_tokens"] = listed
            if step == wanted - 1:
                event["generated_text"] = "text"
                event["details"] = {
                    "finish_reason": "length",
                    "generated_tokens": wanted,
                    "input_length": len(ids),
                    "seed": None,
                }
            self.wfile.write(f"data:{json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *arguments: Any) -> None: ...


ThreadingHTTPServer((options.hostname, options.port), Handler).serve_forever()

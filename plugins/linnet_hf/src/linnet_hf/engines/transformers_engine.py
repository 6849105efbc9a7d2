"""Transformers, loading a folder as anyone would, asked for logits and token ids.

A script for any environment that has Transformers: it imports nothing of Linnet.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main(folder: Path) -> None:
    """Answer ``request.json``."""
    request = json.loads((folder / "request.json").read_text())
    torch.set_num_threads(request["threads"])
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["model"],
        attn_implementation="eager",
        local_files_only=True,
        **{"dtype" if release >= (4, 56) else "torch_dtype": "auto"},
    )
    with torch.inference_mode():
        tokens = torch.tensor([request["tokens"]])
        logits = model(input_ids=tokens, use_cache=False).logits[0].float().numpy()
    np.savez(folder / "answer.npz", logits=logits)
    ids = []
    if request["texts"]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            request["model"], local_files_only=True
        )
        ids = [tokenizer(text)["input_ids"] for text in request["texts"]]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {model.dtype}"
    (folder / "answer.json").write_text(json.dumps({"versions": versions, "ids": ids}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

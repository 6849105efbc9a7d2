"""vLLM, loading a folder as it would serve it, asked for log-probabilities and token ids.

A script for vLLM's own environment: it imports nothing of Linnet. What it says of a position of
the prompt is what it expected there, so nothing is said of what follows the last token.
"""

import json
import os
import sys
from pathlib import Path

# In this process: what goes wrong in one of its own is not said where it can be repeated.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
import vllm

LISTED = 64
CACHE_BYTES = 1 << 30
"""Room for 512 positions of a model of any size; unasked, vLLM takes most of the machine's memory,
and does not start where others use a part of it."""


def main(folder: Path) -> None:
    """Answer ``request.json``."""
    request = json.loads((folder / "request.json").read_text())
    tokens, texts = request["tokens"], request["texts"]
    engine = vllm.LLM(
        model=request["model"],
        dtype="float32",  # so that what differs is the file, and not what two-byte sums round
        max_model_len=len(tokens) + 1,
        max_num_seqs=1,
        max_logprobs=LISTED,
        kv_cache_memory_bytes=CACHE_BYTES,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=not texts,
        seed=0,
    )
    options = vllm.SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=LISTED, detokenize=False
    )
    (output,) = engine.generate([{"prompt_token_ids": tokens}], options)
    ids = np.zeros((len(tokens) - 1, LISTED), np.int64)
    logprobs = np.zeros(ids.shape, np.float32)
    for row, expected in enumerate(output.prompt_logprobs[1:]):
        # The prompt's own token is listed, too, where it is not among the likeliest.
        likeliest = sorted(expected.items(), key=lambda item: item[1].rank)[:LISTED]
        ids[row] = [token for token, _ in likeliest]
        logprobs[row] = [entry.logprob for _, entry in likeliest]
    np.savez(folder / "answer.npz", ids=ids, logprobs=logprobs)
    found = []
    if texts:
        tokenizer = engine.get_tokenizer()
        found = [tokenizer(text)["input_ids"] for text in texts]
    answer = {"versions": f"vllm {vllm.__version__}", "ids": found}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

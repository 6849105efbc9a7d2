"""SGLang, loading a folder as it would serve it, asked for log-probabilities and token ids.

A script for SGLang's own environment: it imports nothing of Linnet. It runs on the processor on
every machine, in f32 and by SGLang's plain PyTorch, so that what differs is the file and not what a
GPU's two-byte sums round. What SGLang says of a position of the prompt is what it expected there,
so nothing is said of what follows the last token.
"""

import json
import os
import sys
import types
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch

LISTED = 64


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cosines_and_sines: torch.Tensor,
    is_neox: bool,
) -> None:
    """Turn queries and keys ``[T, heads * head_size]`` in place, as vLLM's operator does."""
    assert is_neox
    cosines, sines = cosines_and_sines[positions.flatten()][:, None].chunk(2, -1)
    for heads in (query, key):
        turned = heads.view(len(heads), -1, head_size)[..., : 2 * cosines.shape[-1]]
        first, second = turned.chunk(2, -1)
        both = (first * cosines - second * sines, second * cosines + first * sines)
        turned.copy_(torch.cat(both, -1))


def without_kernels() -> None:
    """Give SGLang the one operator that it takes from vLLM where it has no kernels of its own."""
    operators = types.ModuleType("vllm._custom_ops")
    vars(operators)["rotary_embedding"] = rotary_embedding
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules.setdefault("vllm._custom_ops", operators)


without_kernels()  # at the import: SGLang's scheduler is a process that imports this file again


def main(folder: Path) -> None:
    """Answer ``request.json``."""
    import sglang

    request = json.loads((folder / "request.json").read_text())
    tokens, texts = request["tokens"], request["texts"]
    engine = sglang.Engine(
        model_path=request["model"],
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=not texts,
        context_length=len(tokens) + 8,
        max_total_tokens=2 * len(tokens) + 512,
        max_running_requests=1,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        random_seed=0,
        log_level="error",
    )
    answered = engine.generate(
        input_ids=tokens,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=LISTED,
    )
    listed = np.array(
        [  # [S - 1, K, 2]: nothing was expected in the first place
            [(logprob, token) for logprob, token, _ in place]
            for place in answered["meta_info"]["input_top_logprobs"][1:]
        ]
    )
    np.savez(
        folder / "answer.npz",
        ids=listed[..., 1].astype(np.int64),
        logprobs=listed[..., 0].astype(np.float32),
    )
    found = []
    if texts:
        tokenizer = engine.tokenizer_manager.tokenizer
        found = [tokenizer(text)["input_ids"] for text in texts]
    answer = {"versions": f"sglang {sglang.__version__}", "ids": found}
    (folder / "answer.json").write_text(json.dumps(answer))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

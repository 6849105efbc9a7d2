"""llama.cpp through ``xllamacpp``, on Linnet's GGUF of the same dtype or on the model's own.

``xllamacpp`` offers llama.cpp's server, which also answers calls from within the process: no HTTP
is timed. The whole answer is timed by us; llama.cpp's own clock splits it, since an answer in
pieces leaves out those that are no whole characters. The token ids come with the answer.

llama.cpp's ``ignore_eos`` forbids the end of text instead of going on after it.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from linnet.bench.timing import time_runs
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run

GREEDY = {"temperature": 0, "samplers": ["top_k"], "top_k": 1, "cache_prompt": False}


class LlamaCpp:
    """One request at a time on llama.cpp's server, called in the process."""

    def prepare(self, job: Job) -> Prepared:
        """The model as GGUF in the job's dtype."""
        from linnet.runtime.load import bind
        from linnet_gguf.export import GGUFExporter

        bound = bind(job.model)
        if bound.checkpoint.text.tokenizer is None:
            raise BenchError("llama.cpp loads no model without a tokenizer, and this one has none")
        artifact = GGUFExporter().export(bound, Path(job.folder) / "gguf", {"dtype": job.dtype})
        notes = [f"reads Linnet's GGUF in {job.dtype}", *artifact.notes]
        return _prepared(job, artifact.files[0], bound, notes)

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then decode the probe with the reference's tokens."""
        import xllamacpp

        assert job.prepared is not None
        workload = job.workload
        start = time.perf_counter()
        settings = xllamacpp.CommonParams()
        settings.model.path = job.prepared.path
        settings.n_gpu_layers = 0
        settings.n_ctx = workload.context + 8
        settings.n_parallel = 1
        settings.cpuparams.n_threads = job.threads
        settings.cpuparams_batch.n_threads = job.threads
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO
        settings.cache_prompt = False
        settings.cache_ram_mib = 0
        settings.ctx_shift = False
        settings.warmup = True
        self.server = xllamacpp.Server(settings)
        load_s = time.perf_counter() - start

        timed = time_runs(job, self.generate)
        tokens = self.probe(job)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted={
                "backend": "llama.cpp",
                "mode": "server, called in process",
                "dtype": job.dtype,
                "device": "cpu",
                "attention": "flash attention: auto",
                "cache": "f16",
                "threads": int(settings.cpuparams.n_threads),
            },
            weight_bytes=job.prepared.weight_bytes,
            tokens=tokens,
            notes=[
                f"batch {settings.n_batch}, micro-batch {settings.n_ubatch}, poll "
                f"{settings.cpuparams.poll}, no prompt cache, end of text forbidden",
                "timed by us around the call, split by llama.cpp's own clock",
            ],
        )

    def ask(self, prompt: list[int], new_tokens: int, **options: Any) -> dict[str, Any]:
        """The whole answer to a prompt of token ids, with the ids that were chosen."""
        answer: Any = self.server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": new_tokens,
                "verbose": True,
                "return_tokens": True,
                **GREEDY,
                **options,
            }
        )
        if not isinstance(answer, dict) or "choices" not in answer:
            raise BenchError(f"llama.cpp answered {str(answer)[:500]}")
        return answer

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request."""
        start = time.perf_counter()
        answer = self.ask(prompt, new_tokens, ignore_eos=True)
        whole = time.perf_counter() - start
        details = answer["__verbose"]
        clock = details["timings"]
        if clock["prompt_n"] != len(prompt) or clock["cache_n"]:
            raise BenchError(
                f"llama.cpp computed {clock['prompt_n']} of {len(prompt)} prompt tokens and took "
                f"{clock['cache_n']} from a cache"
            )
        decode_s = clock["predicted_ms"] / 1e3
        return Run((whole - decode_s) * 1e3, decode_s, details["tokens"])

    def probe(self, job: Job) -> list[int]:
        """Save log-probabilities of the whole vocabulary after the prompt and after each token.

        The prompt cache is on here, so that each step decodes one token as a timed one does.
        """
        tokens: list[int] = []
        ids, logprobs = [], []
        for step in range(job.workload.probe_tokens + 1):
            answer = self.ask([*job.prompts[-1], *tokens], 1, n_probs=1 << 20, cache_prompt=True)
            (content,) = answer["choices"][0]["logprobs"]["content"]
            listed = sorted((top["id"], top["logprob"]) for top in content["top_logprobs"])
            ids.append([token for token, _ in listed])
            logprobs.append([logprob for _, logprob in listed])
            likeliest = content["top_logprobs"][0]["id"]
            tokens.append(job.forced[step] if job.forced and step < len(job.forced) else likeliest)
        np.savez(
            Path(job.folder) / "probe.npz",
            ids=np.array(ids, np.int64),
            logprobs=np.array(logprobs, np.float64),
        )
        return tokens[:-1]


class LlamaCppOriginal(LlamaCpp):
    """The same on a GGUF file that is not of Linnet's making."""

    def prepare(self, job: Job) -> Prepared:
        """The model's own file. Raises BenchError where that is no GGUF, or is in another dtype."""
        from linnet.runtime.load import bind
        from linnet.weights.binding import main_encoding

        bound = bind(job.model)
        file, stored = bound.checkpoint.location, main_encoding(bound)
        if bound.checkpoint.format != "gguf":
            raise BenchError(f"the model's own files are {bound.checkpoint.format}, not GGUF")
        if stored != job.dtype:
            raise BenchError(f"the model's own file is in {stored}, not {job.dtype}")
        return _prepared(job, file, bound, [f"reads the model's own {file.name}"])


def _prepared(job: Job, file: Path, bound: Any, notes: list[str]) -> Prepared:
    return Prepared(str(file), step_bytes(file, bound, job.workload.middle), notes)


def step_bytes(file: Path, bound: Any, context: int) -> int:
    """What decoding one token must read of a GGUF file: every tensor but the embedding's rows,
    unless the head is tied to them; and the f16 keys and values of ``context`` positions.
    """
    import gguf

    tensors = gguf.GGUFReader(file).tensors
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    cache = sum(
        int(np.prod([d for d in state.type.shape[2:] if isinstance(d, int)]))
        for state in bound.program.states
    )
    return sum(sizes.values()) + 2 * context * cache

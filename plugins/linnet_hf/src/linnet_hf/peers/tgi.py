"""Text Generation Inference, as its launcher starts it: asked over HTTP, answers streamed.

It takes no token ids, so a prompt is the ids decoded, and TGI makes ids of the text again; nor can
it be kept from ending a text. Its makers publish it as a container: Linnet runs inside it, or where
its launcher is installed.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from linnet.bench.timing import Timed, time_runs, time_serving
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run, Serve
from linnet.runtime.load import bind
from linnet.runtime.tokenizer import Tokenizer
from linnet_hf.peers.checkpoint import DTYPES, exported, original
from linnet_hf.peers.probe import Probe, follow_listed

LAUNCHER = "text-generation-launcher"
LISTED = 64
"""Likeliest tokens of a position that the distance is taken of."""
SPARE = 1.25
"""Room for prompts that have more tokens once they are decoded and read again."""


class TGI:
    """TGI on a checkpoint that is not of Linnet's making."""

    def checkpoint(self, job: Job) -> Prepared:
        """The model's own folder."""
        return original(job)

    def measure(self, job: Job) -> Measurement:
        """Start the launcher, warm up, time every run, then ask what the probe's positions have."""
        return self.served(job, self.checkpoint(job), job.workload.context, 1)

    def served(self, job: Job, prepared: Prepared, length: int, rows: int) -> Measurement:
        """Start a server for so many rows of a length, and tell all that is told of a row."""
        self.tokenizer = _tokenizer(job)
        self.lengths: list[tuple[int, int]] = []
        self.ended = 0
        start = time.perf_counter()
        with Launched(prepared.path, job.dtype, int(length * SPARE), rows) as self.server:
            load_s = time.perf_counter() - start
            timed = self.time(job)
            held = gpu_bytes()
            notes = [*prepared.notes, *self.notes()]
            probe = self.probe(job)
        return Measurement(
            **{**vars(timed), "peak_bytes": held, "memory": "reserved"},
            load_s=load_s,
            granted={"backend": "tgi", "mode": "HTTP", **self.server.about},
            tokens=probe.tokens,
            notes=[
                *notes,
                f"the probe began anew {probe.restarts} times, where TGI chose another token",
            ],
            fixed_length=False,
        )

    def time(self, job: Job) -> Timed:
        """One request at a time."""
        return time_runs(job, self.generate)

    def notes(self) -> list[str]:
        """What stands beside the figures."""
        longer = [read - given for given, read in self.lengths]
        said = [
            "over HTTP, streamed; its pool takes what is left of the GPU: a setting, not a need",
            "the prompt is the token ids decoded and tokenized again: "
            f"{min(longer):+d} to {max(longer):+d} tokens",
        ]
        if self.ended:
            said.append(
                f"{self.ended} texts ended before their length, which TGI cannot be kept from: "
                "speeds count the tokens that came"
            )
        return said

    def stream(self, prompt: list[int], new_tokens: int, **options: Any) -> Iterator[Any]:
        """What TGI sends for a prompt of token ids, as it comes."""
        text = self.tokenizer.decode(prompt, skip_special=False)
        details = None
        for sent in self.server.client.text_generation(
            text, details=True, stream=True, max_new_tokens=new_tokens, do_sample=False, **options
        ):
            details = sent.details or details
            yield sent
        if details is None:
            raise BenchError("TGI ended a stream without saying what it did")
        self.lengths.append((len(prompt), details.input_length))
        self.ended += details.generated_tokens < new_tokens

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request. The clock starts with the ids, and each token is on the host."""
        start = time.perf_counter()
        first, tokens = 0.0, []
        for sent in self.stream(prompt, new_tokens):
            first = first or time.perf_counter()
            tokens.append(sent.token.id)
        return Run((first - start) * 1e3, time.perf_counter() - first, tokens)

    def probe(self, job: Job) -> Probe[Any]:
        """Save the likeliest ids and their log-probabilities ``[probe_tokens + 1, K]``."""

        def decode(prompt: list[int], wanted: int) -> Iterator[tuple[int, Any]]:
            for sent in self.stream(prompt, wanted, top_n_tokens=LISTED):
                yield sent.token.id, [(top.id, top.logprob) for top in sent.top_tokens]

        return follow_listed(job, decode)


class TGIExport(TGI):
    """TGI on Linnet's export."""

    def checkpoint(self, job: Job) -> Prepared:
        """Linnet's Transformers checkpoint."""
        return exported(job)


class ServeTGI(TGI):
    """TGI with many requests in flight, batching as it likes."""

    def measure(self, job: Job) -> Measurement:
        """Start the launcher, warm up, time every run, then ask what the probe's positions have."""
        assert job.serving is not None
        length = max(job.serving.context, job.workload.context)
        return self.served(job, self.checkpoint(job), length, job.serving.in_flight)

    def time(self, job: Job) -> Timed:
        """As many requests at a time as the workload has in flight."""
        serving = job.serving
        assert serving is not None
        with ThreadPoolExecutor(serving.in_flight) as pool:

            def serve(prompts: list[list[int]]) -> Serve:
                start = time.perf_counter()
                runs = list(pool.map(lambda p: self.generate(p, serving.new_tokens), prompts))
                seconds = time.perf_counter() - start
                return Serve(seconds, [run.ttft_ms for run in runs], [run.tokens for run in runs])

            return time_serving(job, serve)


class ServeTGIExport(ServeTGI):
    """The same on Linnet's export."""

    def checkpoint(self, job: Job) -> Prepared:
        """Linnet's Transformers checkpoint."""
        return exported(job)


class Launched:
    """A server on a folder, from when it answers until it is left."""

    def __init__(self, folder: str, dtype: str, length: int, rows: int) -> None:
        launcher = shutil.which(LAUNCHER)
        if launcher is None:
            raise BenchError(
                f"TGI is not here: {LAUNCHER} is not on the PATH; its makers publish it as a "
                "container, in which Linnet can be installed"
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.made = Path(tempfile.mkdtemp(prefix="linnet-tgi-"))
        options = {
            "model-id": folder,
            "dtype": DTYPES[dtype],
            "hostname": "127.0.0.1",
            "port": port,
            "num-shard": 1,
            "shard-uds-path": self.made / "shard",
            "max-input-tokens": length - 1,
            "max-total-tokens": length,
            "max-concurrent-requests": max(rows, 1),
            "max-top-n-tokens": LISTED,
            "usage-stats": "off",
        }
        self.command = [launcher, *(f"--{name}={value}" for name, value in options.items())]

    def __enter__(self) -> "Launched":
        from huggingface_hub import InferenceClient

        self.log = (self.made / "log").open("w+")
        self.process = subprocess.Popen(
            self.command,
            stdout=self.log,
            stderr=self.log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PREFIX_CACHING": "0", "HF_HUB_OFFLINE": "1"},
        )
        self.client = InferenceClient(base_url=self.url, timeout=600)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # the launcher ends its shard and its router
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.made, ignore_errors=True)

    def _wait(self) -> None:
        """Until it answers. Raises BenchError with the end of what it said where it ends first."""
        direct = build_opener(ProxyHandler({}))
        while self.process.poll() is None:
            try:
                direct.open(f"{self.url}/health", timeout=10).close()
                with direct.open(f"{self.url}/info", timeout=10) as answer:
                    told = json.load(answer)
            except OSError:  # nobody listens yet, or it is not yet healthy
                time.sleep(0.1)
                continue
            self.about = {key: told[key] for key in ("version", "model_dtype", "model_device_type")}
            return
        self.log.seek(0)
        said = self.log.read().strip().splitlines()[-3:]
        raise BenchError(
            f"{LAUNCHER} ended with status {self.process.returncode}: "
            + ("\n".join(said) or "it said nothing")
        )


def _tokenizer(job: Job) -> Tokenizer:
    checkpoint = bind(job.model).checkpoint
    if checkpoint.text.tokenizer is None:
        raise BenchError(f"TGI takes text alone, and {job.model} has no tokenizer")
    return Tokenizer(checkpoint.text, checkpoint.config)


def gpu_bytes() -> int:
    """What the GPUs' driver says is in use, by every process: a container sees no others' ids."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return sum(int(mebibytes) for mebibytes in said.split()) << 20

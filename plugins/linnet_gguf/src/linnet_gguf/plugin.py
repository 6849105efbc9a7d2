"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import BenchMethod, Exporter, Format
from linnet.plugins.hookspecs import hookimpl


@hookimpl
def linnet_register_formats() -> list[Format]:
    """The GGUF format."""
    return [
        Format(
            name="gguf",
            target="linnet_gguf.reader:GGUFFormat",
            suffixes=(".gguf",),
            markers=("*.gguf",),
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_exporters() -> list[Exporter]:
    """GGUF files for llama.cpp and what is built on it."""
    return [
        Exporter(
            name="gguf",
            target="linnet_gguf.export:GGUFExporter",
            title="GGUF, for llama.cpp and Ollama",
            dtypes=("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"),
            requires=("gguf",),
            extra="linnet[gguf]",
            engines=("llamacpp",),
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_bench_methods() -> list[BenchMethod]:
    """llama.cpp, on Linnet's GGUF and on the model's own."""
    return [
        BenchMethod(
            name=name,
            target=f"linnet_gguf.peers.llamacpp:{target}",
            title=title,
            group="LLM engines",
            dtypes=("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"),
            environment="llamacpp",
            packages=("xllamacpp==2026.10.11549",),
            api_version=1,
        )
        for name, target, title in (
            ("llamacpp-original", "LlamaCppOriginal", "llama.cpp on the model's own GGUF"),
            ("llamacpp", "LlamaCpp", "llama.cpp on Linnet's GGUF"),
        )
    ]

"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, BenchMethod, Capability, Exporter, Format
from linnet.plugins.hookspecs import hookimpl


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """ONNX Runtime."""
    return [
        Backend(
            name="onnx",
            target="linnet_onnx.backend:OnnxBackend",
            title="ONNX Runtime",
            modes=("ort", "tensorrt"),
            devices=("cpu", "cuda"),
            dtypes=("f32", "f16", "bf16", "int8", "int4"),
            capabilities=frozenset({Capability.FORWARD, Capability.CACHE, Capability.CHOICE}),
            requires=("onnx_ir", "onnxruntime"),
            extra="linnet[onnx]",
            priority=40,
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_formats() -> list[Format]:
    """Weights in blocks, as the exporter writes them."""
    return [
        Format(
            name="onnx-blocks",
            target="linnet_onnx.encoded:BlocksFormat",
            suffixes=(".blocks",),
            markers=("model.blocks",),
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_exporters() -> list[Exporter]:
    """ONNX graphs with their weights."""
    return [
        Exporter(
            name="onnx",
            target="linnet_onnx.export:OnnxExporter",
            title="ONNX graphs, for ONNX Runtime and what else reads them",
            dtypes=("f32", "f16", "bf16", "int8", "int4"),
            engines=("onnxruntime",),
            requires=("onnx", "onnx_ir", "onnxruntime"),
            extra="linnet[onnx]",
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_bench_methods() -> list[BenchMethod]:
    """The onnx backend in each of its modes."""
    rows = (
        ("linnet-ort", "OnnxRuntime", "Linnet, ONNX Runtime", ("int8", "int4")),
        ("linnet-tensorrt", "TensorRT", "Linnet, TensorRT", ()),
    )
    return [
        BenchMethod(
            name=name,
            target=f"linnet_onnx.bench:{target}",
            title=title,
            group="ONNX Runtime and TensorRT",
            dtypes=("f32", "f16", "bf16", *blocks),
            requires=("onnx_ir", "onnxruntime"),
            extra="linnet[onnx]",
            api_version=1,
        )
        for name, target, title, blocks in rows
    ]

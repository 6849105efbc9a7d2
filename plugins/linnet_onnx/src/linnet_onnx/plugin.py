"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, Capability
from linnet.plugins.hookspecs import hookimpl


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """ONNX Runtime."""
    return [
        Backend(
            name="onnx",
            target="linnet_onnx.backend:OnnxBackend",
            title="ONNX Runtime",
            modes=("ort",),
            devices=("cpu", "cuda"),
            dtypes=("f32", "f16", "bf16"),
            capabilities=frozenset({Capability.FORWARD, Capability.CACHE, Capability.CHOICE}),
            requires=("onnx_ir", "onnxruntime"),
            extra="linnet[onnx]",
            priority=40,
            api_version=1,
        )
    ]

"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Format
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

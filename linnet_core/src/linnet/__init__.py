"""Linnet: a model's architecture written once, run and exported everywhere.

``linnet.load`` gives a model that generates; ``linnet.NAME.export`` reaches the exporter NAME of
any installed plugin. Importing ``linnet`` imports no framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linnet.runtime.load import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What is imported when it is first asked for: ``load``, and exporters by name."""
    if name.startswith("_"):  # Python's own questions, such as __path__: no exporter is meant
        raise AttributeError(f"module 'linnet' has no attribute {name!r}")
    if name == "load":
        from linnet.runtime.load import load

        globals()["load"] = load
        return load

    from linnet.errors import PluginError
    from linnet.plugins.exports import NamedExporter
    from linnet.plugins.manager import plugin_manager

    manager = plugin_manager()
    try:
        return NamedExporter(manager.exporter(name), manager.implementation)
    except PluginError as error:
        raise AttributeError(f"module 'linnet' has no attribute {name!r}: {error}") from error

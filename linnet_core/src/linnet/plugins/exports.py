"""An exporter as people call it: ``linnet.NAME.export(model, folder, option=value)``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.plugins.descriptors import Exporter

if TYPE_CHECKING:  # it imports NumPy
    from linnet.plugins.interfaces import Artifact


@dataclass(frozen=True)
class NamedExporter:
    """The exporter that a descriptor describes, imported when ``export`` is called."""

    descriptor: Exporter
    implementation: Callable[[Exporter], Any]

    def export(self, model: Any, folder: str | Path, **options: Any) -> "Artifact":
        """Write a loaded or a bound model to ``folder``, whole or not at all.

        The options are the exporter's own; it refuses those that it does not know.
        """
        bound = getattr(model, "bound", model)
        values: Mapping[str, Any] = options
        artifact: Artifact = self.implementation(self.descriptor).export(
            bound, Path(folder), values
        )
        return artifact

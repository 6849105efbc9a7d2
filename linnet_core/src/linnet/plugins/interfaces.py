"""The interfaces that descriptors' targets implement, as typing protocols.

Arrays cross these interfaces as NumPy. No framework's type appears in a signature.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from linnet.plugins.benchmark import Job, Measurement, Prepared
from linnet.spec.program import Program
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array, Checkpoint


class FamilyInterface(Protocol):
    """An architecture."""

    def bind(self, checkpoint: Checkpoint) -> BoundModel:
        """Read the config, build the program, and match every tensor to a parameter.

        Raises ConfigError for a config that it cannot honour to the letter, BindingError when
        tensors and parameters do not fit.
        """

    def program(self, config: Mapping[str, Any]) -> Program:
        """The program for a config alone, for machines that have no weights."""


class FormatInterface(Protocol):
    """A checkpoint format."""

    def open(self, path: Path) -> Checkpoint:
        """Open a file or folder without reading tensors. Raises CheckpointError."""


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run here, and if not, why, ending in what to do."""

    available: bool
    detail: str
    """Versions and devices when available, the reason when not."""


@dataclass(frozen=True)
class LoadOptions:
    """What the user asked for. ``None`` leaves the choice to the backend, which reports it.

    ``threads`` is already the budget of this process (see ``linnet.runtime.threads``).
    """

    mode: str | None = None
    dtype: str | None = None
    device: str | None = None
    rows: int = 1
    max_seq: int | None = None
    threads: int = 1
    numerics: str = "fast"
    """``fast`` lets a backend use its own kernels for composites; ``exact`` runs their bodies."""


@dataclass(frozen=True)
class Granted:
    """What a session really is: read off the thing that runs, not copied from what was asked."""

    backend: str
    mode: str
    dtype: str
    device: str
    rows: int
    max_seq: int
    threads: int
    numerics: str = "fast"
    provider: str = ""
    notes: tuple[str, ...] = ()


class Session(Protocol):
    """A loaded model: it runs entries and owns their states.

    Entries and their arguments, all NumPy, are those of ``linnet.spec.decoder``: tokens, rows,
    starts, lengths and positions are int32. What ``run`` returns belongs to the caller: a session
    that reuses its buffers copies them out.
    """

    @property
    def granted(self) -> Granted:
        """What this session really is."""

    def run(self, entry: str, inputs: Mapping[str, Array]) -> Array:
        """Run one entry. Logits come back as float32, tokens as int32.

        Raises RequestError for inputs of the wrong name, dtype or shape, or out of range.
        """

    def source(self) -> str | None:
        """The source this backend generated, where it has Capability.SOURCE."""

    def close(self) -> None:
        """Free what it holds. A closed session refuses to run."""


class BackendInterface(Protocol):
    """A backend. The target is a class with no-argument construction."""

    def probe(self) -> Probe:
        """Look for the framework and its devices. Never raises for what is merely absent."""

    def load(self, model: BoundModel, options: LoadOptions) -> Session:
        """Raises UnavailableError for a mode, dtype or device it cannot grant: it never swaps."""


@dataclass(frozen=True)
class Artifact:
    """What an export wrote.

    ``notes`` are what the target does otherwise, or does not read. ``verification`` is the content
    of ``linnet-export.json``, where the target was run on the artifact.
    """

    folder: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    verification: Mapping[str, Any] | None = None


class ExporterInterface(Protocol):
    """An exporter."""

    def export(self, model: BoundModel, folder: Path, options: Mapping[str, Any]) -> Artifact:
        """Write ``folder`` whole, or not at all."""


class BenchMethodInterface(Protocol):
    """A benchmark method."""

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, run and measure, in a process that does nothing else."""


class PeerMethodInterface(BenchMethodInterface, Protocol):
    """A benchmark method that measures in an environment of its own.

    The target's module is imported in both environments: what it imports at its top is only
    Linnet and its own distribution.
    """

    def prepare(self, job: Job) -> Prepared:
        """Write what the peer reads into ``job.folder``, in Linnet's own environment, untimed.

        ``measure`` finds it in ``job.prepared``.
        """

"""The folder that a peer reads: Linnet's export, or a checkpoint that is not of Linnet's making."""

from pathlib import Path

from linnet.bench.sessions import step_bytes
from linnet.plugins.benchmark import Job, Prepared
from linnet.runtime.load import bind
from linnet.weights.binding import BoundModel

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""What every peer calls a dtype."""


def exported(job: Job, dtype: str | None = None) -> Prepared:
    """Linnet's export in the job's dtype, or in another that the peer makes its own of."""
    from linnet_hf.export import TransformersExporter

    dtype = dtype or job.dtype
    bound = bind(job.model)
    folder = Path(job.folder) / "checkpoint"
    artifact = TransformersExporter().export(bound, folder, {"dtype": dtype})
    note = f"reads Linnet's Transformers export in {dtype}"
    return Prepared(str(folder), _step_bytes(bound, job, dtype), [note, *artifact.notes])


def original(job: Job, dtype: str | None = None) -> Prepared:
    """The model's own folder; where it has another format, what Transformers itself saves."""
    dtype = dtype or job.dtype
    bound = bind(job.model)
    where = bound.checkpoint.location
    if where.is_dir():
        return Prepared(
            str(where), _step_bytes(bound, job, dtype), ["reads the model's own folder"]
        )
    from linnet_hf.backend import load_model

    folder = Path(job.folder) / "checkpoint"
    load_model(bound, dtype).save_pretrained(folder)
    note = f"{where.name} is no Transformers folder: reads what Transformers saves of it"
    return Prepared(str(folder), _step_bytes(bound, job, dtype), [note])


def own_or_exported(job: Job, dtype: str | None = None) -> Prepared:
    """The model's own folder where it has one, Linnet's export otherwise."""
    own = bind(job.model).checkpoint.location.is_dir()
    return original(job, dtype) if own else exported(job, dtype)


def _step_bytes(bound: BoundModel, job: Job, dtype: str) -> int:
    return step_bytes(bound, dtype, job.workload.middle)

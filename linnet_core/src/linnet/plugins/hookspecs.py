"""Every hook a plugin may implement. None takes an argument; each returns a list of descriptors.

A plugin is an entry point in the group ``linnet`` whose value is a module of these functions,
marked with ``hookimpl``. The module imports ``linnet`` and nothing else: a descriptor names its
implementation by a dotted target, which is imported when it is first used.
"""

import pluggy

from linnet.plugins.descriptors import Backend, BenchMethod, Exporter, Family, Format

hookspec = pluggy.HookspecMarker("linnet")
hookimpl = pluggy.HookimplMarker("linnet")


@hookspec
def linnet_register_models() -> list[Family]:
    """Architectures: recognise a config, build its program, name its tensors."""
    raise NotImplementedError


@hookspec
def linnet_register_formats() -> list[Format]:
    """Checkpoint formats: open a path as a checkpoint."""
    raise NotImplementedError


@hookspec
def linnet_register_backends() -> list[Backend]:
    """Backends: run a bound model's entries."""
    raise NotImplementedError


@hookspec
def linnet_register_exporters() -> list[Exporter]:
    """Exporters: write a bound model for another engine, and verify what was written."""
    raise NotImplementedError


@hookspec
def linnet_register_bench_methods() -> list[BenchMethod]:
    """Benchmark methods: one row of the results each."""
    raise NotImplementedError

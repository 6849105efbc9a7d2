"""The errors Linnet raises on purpose.

Every message names the thing, the values that disagree, and what to do next.
The command line prints them without a traceback and exits with status 1.
"""


class LinnetError(Exception):
    """Base of every error that Linnet raises on purpose."""


class ConfigError(LinnetError):
    """A model config is missing a value, contradicts itself, or asks for what is not supported."""


class CheckpointError(LinnetError):
    """A checkpoint file is damaged, hostile, incomplete, or of a format nobody here reads."""


class BindingError(LinnetError):
    """A checkpoint's tensors do not fit the program's parameters."""


class SpecError(LinnetError):
    """A program is not well typed: found while tracing, or when one is read from JSON."""


class PluginError(LinnetError):
    """A plugin is broken, outdated, duplicated or not installed."""


class UnavailableError(LinnetError):
    """What was asked for (a device, dtype, provider, mode) cannot be granted here."""


class SourceError(LinnetError):
    """A model's files cannot be found, fetched or verified."""


class BenchError(LinnetError):
    """A measurement that cannot be made, or that is void."""


class RequestError(LinnetError):
    """A generation request is not valid: a bad sampling option, an empty or over-long prompt."""


class ComparisonError(LinnetError):
    """Two outputs cannot be compared: their shapes differ, or the reference is not finite."""


class VerificationError(LinnetError):
    """An export that was run by its target engine, and is too far from the model it is made of."""

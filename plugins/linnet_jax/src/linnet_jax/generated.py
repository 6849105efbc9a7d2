"""Running generated source: a file's text as a module, whose lines tracebacks show."""

import hashlib
import linecache
import types


def load_module(text: str, name: str) -> types.ModuleType:
    """The module of a generated file."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    filename = f"<linnet {name} {digest}>"
    module = types.ModuleType(f"linnet_jax.generated.{name}_{digest}")
    module.__file__ = filename
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), vars(module))
    return module

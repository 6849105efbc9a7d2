"""Paths of parameters and states as a generated file writes them."""

from collections.abc import Iterator, Sequence

from linnet.spec.layout import wrap


def attribute(path: str) -> str:
    """A path as attributes: ``q_proj+k_proj+v_proj.weight`` is ``qkv_proj.weight``."""
    return ".".join(_joined(name) if "+" in name else name for name in path.split("."))


def _joined(name: str) -> str:
    stems = [part.removesuffix("_proj") for part in name.split("+")]
    alike = all(part.endswith("_proj") for part in name.split("+"))
    between = "" if all(len(stem) == 1 for stem in stems) else "_"
    return between.join(stems) + "_proj" * alike


def _pattern(path: str) -> str:
    """``layers.{i}.norm.weight`` for ``layers.0.norm.weight``."""
    parts = path.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if first is not None:
        parts[first] = "{i}"
    return ".".join(parts)


def loops(paths: Sequence[str]) -> Iterator[tuple[list[str], str, int]]:
    """Lines that loop over alike paths, the key in them, and how far they are indented."""
    patterns: dict[str, list[int]] = {}
    for path in paths:
        numbers = [int(part) for part in path.split(".") if part.isdecimal()]
        patterns.setdefault(_pattern(path), []).extend(numbers[:1])
    by_range: dict[tuple[int, ...], list[str]] = {}
    for pattern, numbers in patterns.items():
        by_range.setdefault(tuple(numbers), []).append(pattern)
    for indices, group in by_range.items():
        if not indices:
            for pattern in group:
                yield [], f'"{pattern}"', 1
            continue
        count = len(indices)
        turns = f"range({count})" if indices == tuple(range(count)) else repr(indices)
        loop = [f"    for i in {turns}:"]
        for pattern in group:
            yield loop, f'f"{pattern}"', 2
            loop = []


def joins(paths: Sequence[str]) -> list[str]:
    """Lines that call ``join`` to make each of these joined parameters of its parts."""
    lines = []
    for loop, key, depth in loops(paths):
        pattern = key.strip('f"')
        local = pattern.rpartition(".")[2]
        owner, _, whole = pattern.removesuffix(f".{local}").rpartition(".")
        parts = ", ".join(f'"{part}.{local}"' for part in whole.split("+"))
        at = f'f"{owner}"' if key.startswith("f") else f'"{owner}"'
        call = f'join(flat, {at}, ({parts}), "{attribute(whole)}.{local}")'
        lines += [*loop, *wrap("    " * depth + call)]
    return lines

"""Laying out lines of Python: what does not fit is broken the way common formatters break it."""

WIDTH = 100


def wrap(line: str, width: int = WIDTH) -> list[str]:
    """One statement as one or more lines of at most ``width`` where that can be done."""
    if len(line) <= width:
        return [line]
    opening = _last_opening(line)
    if opening is None:
        return [line]
    closing = _matching(line, opening)
    indent = " " * (len(line) - len(line.lstrip()))
    inner = line[opening + 1 : closing]
    head, tail = line[: opening + 1], indent + line[closing:]
    if len(indent) + 4 + len(inner) <= width:
        return [head, f"{indent}    {inner}", tail]
    parts = _split(inner)
    return [head, *(f"{indent}    {part}," for part in parts), tail]


def _last_opening(line: str) -> int | None:
    """The bracket whose content is the rest of the line, but for what follows it."""
    depth, found = 0, None
    for place, character in enumerate(line):
        if character in "([{":
            if depth == 0:
                following = line[_matching(line, place) - 1]
                if following != character:  # not an empty pair
                    found = place
            depth += 1
        elif character in ")]}":
            depth -= 1
    return found


def _matching(line: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(line)):
        if line[place] in "([{":
            depth += 1
        elif line[place] in ")]}":
            depth -= 1
            if depth == 0:
                return place
    raise ValueError(f"a bracket is not closed: {line}")


def _split(inner: str) -> list[str]:
    """Parts between commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(inner):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(inner[start:place].strip())
            start = place + 1
    parts.append(inner[start:].strip())
    return [part for part in parts if part]

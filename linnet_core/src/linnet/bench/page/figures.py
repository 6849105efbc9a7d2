"""Numbers as people read them: three digits, one unit for each metric."""

import math

UNITS = {
    "ttft_ms": "ms",
    "decode_tok_s": "tok/s",
    "serve_tok_s": "tok/s",
    "serve_ttft_ms": "ms",
    "load_s": "s",
    "peak_bytes": "GiB",
    "share_of_limit": "%",
    "distance": "",
}
SCALES = {"peak_bytes": 1 / 2**30, "share_of_limit": 100.0}
"""From what the results hold to the unit that is shown."""


def digits(value: float) -> str:
    """Three digits that count, thousands apart; ``0`` for nothing."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 0.9995:
        return f"{value:.{1 if size >= 9.995 else 2}f}"
    if size < 0.001:
        return f"{value:.2g}"
    return max(f"{value:.2f}", f"{value:.3g}", key=len)  # 0.30, 0.102


def shown(name: str, value: float) -> str:
    """A value of a metric with its unit."""
    unit = UNITS[name]
    text = digits(value * SCALES.get(name, 1.0))
    return text if not unit else f"{text}%" if unit == "%" else f"{text} {unit}"


def span(name: str, low: float, high: float) -> str:
    """The spread of a metric, without its unit."""
    scale = SCALES.get(name, 1.0)
    return f"{digits(low * scale)}–{digits(high * scale)}"


def times(value: float) -> str:
    """A ratio: ``1.25×``."""
    return f"{value:.2f}×" if value < 9.995 else f"{value:,.1f}×"


def per_cent(value: float) -> str:
    """A ratio as what it is off 1: ``+2.0%``."""
    return f"{(value - 1) * 100:+.1f}%".replace("-", "−")


def ticks(largest: float) -> list[float]:
    """Round numbers from 0 to just above ``largest``, four to seven of them."""
    if not largest > 1e-9:
        return [0.0, 1.0]
    rough = largest / 5
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def mark(value: float) -> str:
    """A tick's words: no more digits than it needs."""
    return f"{value:,.10g}"


def size(count: int) -> str:
    """A number of parameters: ``1.7B``, ``135M``."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            scaled = count / unit
            return f"{scaled:.1f}{letter}" if scaled < 9.95 else f"{scaled:.0f}{letter}"
    return str(count)

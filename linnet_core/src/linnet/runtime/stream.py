"""Text out of a stream of tokens: characters made of several tokens, and stop texts across them.

Both classes take their input in any cuts and give the same text; both work in time linear in it.
They know nothing of models.
"""

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from linnet.runtime.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")


class Detokenizer:
    """Turns tokens into text one at a time, holding back only the bytes of a cut character.

    Joined, the chunks are what ``Tokenizer.decode`` gives for all tokens at once, special tokens
    left out. One case differs on purpose: in a run of byte tokens (``<0xE2>``) that is not valid
    UTF-8, ``decode`` replaces every byte of the run, the good characters before it too; a stream
    has already given those, so here only the bad bytes become U+FFFD.

    A token's text does not depend on its neighbours, save that the first one may lose a leading
    space; so each is decoded once, and only bytes are carried from one token to the next.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = False

    def feed(self, token: int) -> str:
        """The text that ``token`` completes, often its own, empty while a character is cut."""
        first, later = self._tokenizer.pieces(token)
        if self._started:
            return self._utf8.decode(later)
        self._started = bool(later)
        return self._utf8.decode(first)

    def flush(self) -> str:
        """The end: one U+FFFD if a character was cut, otherwise nothing."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Cuts text before the first stop text in it.

    The first is the one that is complete first, since generation ends there and then; of two that
    end together the longer one. What may be the start of a stop text is held back until it is
    known whether it is one, and nothing else is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop text that was found."""

    def feed(self, text: str) -> str:
        """The text that is certainly before any stop text. Nothing once one was found."""
        if self.matched is not None:
            return ""
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return held[:at]
        keep = self._open(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """The length of the longest end of ``text`` that a stop text begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def fragment_bytes(token: str, *, byte_level: bool) -> bytes | None:
    """The bytes of a token that is not valid UTF-8 alone, None when it is not made of bytes.

    ``byte_level`` says that every character of ``token`` stands for a byte, as in GPT-2;
    otherwise a byte token is spelled ``<0xE2>``.
    """
    if byte_level:
        try:
            return bytes(_BYTE_OF[char] for char in token)
        except KeyError:
            return None
    match = _BYTE_TOKEN.match(token)
    return bytes([int(match[1], 16)]) if match else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself where that is printable, else 256 upwards."""
    printable = {*range(ord("!"), 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()

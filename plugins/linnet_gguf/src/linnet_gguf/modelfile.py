"""A ``Modelfile`` for Ollama beside a GGUF file: what it does not take from the file itself.

Ollama writes chats with a Go template. One is made for chat templates that write each message by
itself, as most do: its pieces are found by rendering, and it is kept only if it gives what the
model's own template gives for other conversations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linnet.errors import LinnetError
from linnet.runtime.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]
PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Keys of ``generation_config.json``, and Ollama's names for them."""


@dataclass(frozen=True)
class Pieces:
    """What stands before and after each role's content, at the end, and a default system text."""

    around: Mapping[str, tuple[str, str]]
    end: str
    system: str | None = None

    def render(self, messages: Messages) -> str:
        """What the Go template gives."""
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        texts = [
            f"{self.around[m['role']][0]}{m['content']}{self.around[m['role']][1]}"
            for m in messages
        ]
        return "".join(texts) + self.end

    def go(self) -> str:
        """The Go template."""
        cases = [
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for role, (before, after) in self.around.items()
        ]
        chosen = "{{ else ".join(cases)
        return f"{{{{ range .Messages }}}}{{{{ {chosen}{{{{ end }}}}{{{{ end }}}}{self.end}"


def modelfile(
    file: str, tokenizer: Tokenizer | None, generation: Mapping[str, Any], *, adds_bos: bool
) -> tuple[str, str | None]:
    """The content for a GGUF file of that name, and a note where it has no template.

    ``adds_bos``: Ollama puts the first token before what the template gives.
    """
    lines = [f"FROM ./{file}"]
    note = None
    if tokenizer is not None and tokenizer.has_chat_template:
        found = pieces(tokenizer, adds_bos=adds_bos)
        if found is None:
            note = (
                "the Modelfile has no TEMPLATE: the chat template is not one that writes each "
                "message by itself; Ollama takes one that it knows, or none"
            )
        else:
            lines.append(f'TEMPLATE """{found.go()}"""')
            if found.system is not None:
                lines.append(f'SYSTEM """{found.system}"""')
    for name, theirs in PARAMETERS.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            lines.append(f"PARAMETER {theirs} {value}")
    if tokenizer is not None:
        spellings = {index: token for token, index in tokenizer.vocabulary.items()}
        for index in sorted(tokenizer.end_ids):
            if index in spellings:
                lines.append(f"PARAMETER stop {json.dumps(spellings[index], ensure_ascii=False)}")
    return "\n".join(lines) + "\n", note


def pieces(tokenizer: Tokenizer, *, adds_bos: bool) -> Pieces | None:
    """The chat template's pieces; None where it does more than put texts around contents."""
    bos = tokenizer.bos_token if adds_bos else None

    def render(*turns: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.render_chat(messages).removeprefix(bos or "")

    try:
        found = _find(render)
        if found is None:
            return None
        for turns in _CONVERSATIONS:
            messages = [{"role": role, "content": content} for role, content in turns]
            if found.render(messages) != render(*turns):
                return None
    except (LinnetError, ValueError):
        return None
    written = (*(text for pair in found.around.values() for text in pair), found.end)
    if any(mark in text for text in (*written, found.system or "") for mark in ("{{", '"""')):
        return None
    return found


_CONVERSATIONS: Sequence[Sequence[tuple[str, str]]] = (
    (("user", "One"),),
    (("system", "Two words"), ("user", "Three")),
    (("user", "Four"), ("assistant", "Five"), ("user", "Six")),
    (
        ("system", "Seven"),
        *(("user", "Eight"), ("assistant", "Nine")),
        *(("user", "Ten"), ("assistant", "Eleven")),
        ("user", "Twelve"),
    ),
)


def _find(render: Callable[..., str]) -> Pieces | None:
    """Pieces that give the conversation they were found in; ValueError where contents are lost."""
    whole = render(("system", "SSSS"), ("user", "UUUU"), ("assistant", "AAAA"), ("user", "VVVV"))
    before_system, rest = whole.split("SSSS")
    to_user, rest = rest.split("UUUU")
    to_assistant, rest = rest.split("AAAA")
    to_user_again, end = rest.split("VVVV")
    # An answer is begun as a past one is written: what is between need not be divided.
    if to_assistant == end:
        after_user, before_assistant, end = end, "", ""
    else:
        shared = _shared(to_assistant, end)
        after_user, before_assistant, end = shared, to_assistant[len(shared) :], end[len(shared) :]
    first, _ = render(("user", "UUUU")).split("UUUU")
    system = None
    if first.startswith(before_system) and first.endswith(to_user):
        # There is a system text even where none is given.
        system = first[len(before_system) : len(first) - len(to_user)]
        before_user = _shared(to_user[::-1], to_user_again[::-1])[::-1]
    else:
        before_user = first
    if not (to_user.endswith(before_user) and to_user_again.endswith(before_user)):
        return None
    return Pieces(
        {
            "system": (before_system, to_user.removesuffix(before_user)),
            "user": (before_user, after_user),
            "assistant": (before_assistant, to_user_again.removesuffix(before_user)),
        },
        end,
        system,
    )


def _shared(one: str, other: str) -> str:
    """The longest text that both begin with."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]

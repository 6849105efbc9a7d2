"""Chat templates: messages to the text a model was trained on, exactly as Transformers does it.

A template is a program that came with a stranger's checkpoint, so it runs in Jinja's sandbox and
sees nothing but plain data; what it writes and what it repeats with ``*`` is bounded. Its time and
what it joins or pads are not: serve strangers' templates under a limit of memory. Knows nothing of
tokens.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from linnet.errors import RequestError

if TYPE_CHECKING:
    import jinja2

MAX_TEXT = 8 * 2**20
"""Characters a template may write or repeat: far over any context, far under any memory."""

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, and whatever else a template reads."""


class ChatTemplate:
    """A checkpoint's chat template. ``variables`` are its special tokens: ``bos_token``, ..."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._variables = dict(variables or {})

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, ending where the assistant's answer begins.

        ``variables`` reach the template by name (``enable_thinking=False``). Raises RequestError
        for a template that does not parse or run, and for messages that it refuses.
        """
        import jinja2

        inputs = {
            **self._variables,
            **{name: _plain(value, name) for name, value in variables.items()},
            "messages": _checked(messages),
            "tools": None if tools is None else _plain(tools, "tools"),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        room = MAX_TEXT
        try:
            for part in self._template.generate(**inputs):
                room -= len(part)
                if room < 0:
                    raise RequestError(f"the chat template wrote over {MAX_TEXT} characters")
                parts.append(part)
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused these messages: {error}") from error
        except Exception as error:  # a template is a program, and may fail in any way
            what = f"{type(error).__name__}: {error}"
            raise RequestError(f"the chat template failed on these messages: {what}") from error
        return "".join(parts)

    @cached_property
    def _template(self) -> "jinja2.Template":
        import jinja2

        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is not valid Jinja, line {error.lineno}: {error.message}"
            ) from error


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain data, without keys that are None: templates print those as text."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError('messages must be a list like [{"role": "user", "content": "Hi"}]')
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be a mapping with a text under 'role'")
        present = {key: value for key, value in message.items() if value is not None}
        checked.append(_plain(present, f"messages[{index}]"))
    return checked


def _plain(value: Any, where: str) -> Any:
    """``value`` rebuilt from JSON's types: objects carry methods that a sandbox does not know."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise RequestError(f"{where} is a {type(value).__name__}; messages hold JSON values only")


def _environment() -> "jinja2.Environment":
    """The environment of Transformers' chat templates, with a bound on what ``*`` builds."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training; here it is just text."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> str:
            return str(caller())

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    if isinstance(times, int) and isinstance(many, str | list | tuple):
                        _bound(len(many) * times)
            elif isinstance(left, int) and isinstance(right, int):
                _bound(left.bit_length() * right)
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _bound(size: int) -> None:
    if size > MAX_TEXT:
        raise RequestError(f"the chat template would build {size} items; {MAX_TEXT} is the limit")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

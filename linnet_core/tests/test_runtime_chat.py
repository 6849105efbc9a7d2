"""Chat templates: hostile ones are bounded, and bad messages are refused in words."""

import pytest

from linnet.errors import RequestError
from linnet.runtime.chat import MAX_TEXT, ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


def render(source, messages=HI, **variables):
    return ChatTemplate(source).render(messages, **variables)


def test_variables_reach_the_template():
    source = "{{ bos_token }}{{ messages[0].content }}{% if enable_thinking %}!{% endif %}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(HI, enable_thinking=True) == "<s>Hi!"
    assert template.render(HI) == "<s>Hi"


def test_blocks_are_trimmed_and_json_is_not_escaped():
    source = "  {% if true %}\na\n  {% endif %}\n{{ {'k': '<é>'} | tojson }}"
    assert render(source) == 'a\n{"k": "<é>"}'


def test_the_year_of_today():
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_what_the_template_refuses_is_told():
    with pytest.raises(RequestError, match="refused these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_is_not_jinja():
    with pytest.raises(RequestError, match="not valid Jinja, line 2: "):
        render("a\n{% if %}")


def test_a_template_that_fails():
    with pytest.raises(RequestError, match="failed on these messages: ZeroDivisionError"):
        render("{{ 1 / 0 }}")
    with pytest.raises(RequestError, match=r"refused these messages: .*no element 5"):
        render("{{ messages[5].content.x }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(90000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_hostile_templates(source):
    with pytest.raises(RequestError, match="the chat template "):
        render(source)


def test_small_products_are_fine():
    assert render("{{ '-' * 3 }}{{ 2 ** 3 * 2 }}") == "---16"
    assert MAX_TEXT > 10**6


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list"),
        ("Hi", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (["Hi"], r"messages\[0\] must be a mapping"),
        ([*HI, {"content": "x"}], r"messages\[1\] must be a mapping with a text under 'role'"),
        ([{"role": "user", "content": object()}], r"messages\[0\]\.content is a object"),
        ([{"role": "user", "content": [{"text": b""}]}], r"content\[0\]\.text is a bytes"),
    ],
)
def test_messages_that_are_not(messages, message):
    with pytest.raises(RequestError, match=message):
        render("{{ messages }}", messages)


def test_keys_that_are_none_are_left_out():
    message = {"role": "assistant", "content": None, "tool_calls": None}
    source = "{{ messages[0].content is defined }} {{ messages[0] | length }}"
    assert render(source, [message]) == "False 1"

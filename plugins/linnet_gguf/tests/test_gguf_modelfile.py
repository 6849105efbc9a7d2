"""The Modelfile: a Go template that says what the chat template says, or none."""

from dataclasses import replace
from pathlib import Path

import pytest

import linnet
from linnet.models.llama import Llama
from linnet.runtime.tokenizer import Tokenizer
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.testing.text import f0_text
from linnet_gguf.modelfile import modelfile, pieces

HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}"
    "<think>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FOLDED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index0 == 1 %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
)


def tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer(replace(f0_text(), chat_template=template), f0_config())


def test_a_template_that_writes_each_message_by_itself() -> None:
    text, note = modelfile("m.gguf", tokenizer(f0_text().chat_template), {}, adds_bos=False)
    assert note is None
    assert text == (
        'FROM ./m.gguf\nTEMPLATE """{{ range .Messages }}'
        '{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}'
        "<|im_end|>\n<|im_start|>assistant\n"
        '{{ else if eq .Role "assistant" }}{{ .Content }}<|im_end|>\n{{ end }}{{ end }}"""\n'
        'PARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n'
    )


def test_a_default_system_text_is_stated() -> None:
    found = pieces(tokenizer(DEFAULT_SYSTEM), adds_bos=False)
    assert found is not None and found.system == "Be kind."


def test_the_first_token_is_left_to_ollama_where_it_adds_one() -> None:
    with_it = pieces(tokenizer(HEADERS), adds_bos=True)
    assert with_it is not None and with_it.around["user"][0] == "<|im_start|>user\n\n"


@pytest.mark.parametrize(
    "template", [FOLDED, "{{ messages | length }}", "{{ raise_exception('no') }}"]
)
def test_other_templates_are_left_out_with_a_note(template: str) -> None:
    text, note = modelfile("m.gguf", tokenizer(template), {}, adds_bos=False)
    assert "TEMPLATE" not in text and note is not None and "no TEMPLATE" in note


def test_sampling_settings_are_carried(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "eos_token_id": 2,
    }
    text = replace(f0_text(), generation_config=generation)
    model = Llama().bind(replace(random_checkpoint(f0_config(), seed=1), text=text))
    artifact = linnet.gguf.export(model, tmp_path / "out")
    assert [path.name for path in artifact.files] == ["model-f32.gguf", "Modelfile"]
    written = (tmp_path / "out" / "Modelfile").read_text()
    assert written.startswith("FROM ./model-f32.gguf\n")
    assert "PARAMETER temperature 0.6\nPARAMETER repeat_penalty 1.1\nPARAMETER stop" in written

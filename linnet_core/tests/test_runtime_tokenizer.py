"""Token ids are those of Transformers, for text and for chat; end ids come from three files."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post

from linnet.errors import CheckpointError, ConfigError, RequestError
from linnet.runtime.tokenizer import Tokenizer as LinnetTokenizer
from linnet.runtime.tokenizer import end_ids
from linnet.weights.checkpoint import TextFiles

TEXTS = [
    "Hello world",
    " two  spaces ",
    "12 345",
    "it's",
    "日本\U0001fae0é",
    "a<s>b</s> c <s> d",
    "\n\ttab",
    "",
    "<|end|>x<|end|> <|odd|> y",
]
BOS, EOS = "<s>", "</s>"


def add_bos(tokenizer, add):
    bos = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = (
        post.TemplateProcessing(single=f"{BOS} $A", special_tokens=bos)
        if add
        else post.TemplateProcessing(single="$A", special_tokens=[])
    )
    return tokenizer


def byte_level(bos=True):
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in ("He", "ll", "Hell", "Ġw", "or"):
        vocab[piece] = len(vocab)
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Ġ", "w"), ("o", "r")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, "<|end|>"])
    return add_bos(tokenizer, bos)


def sentencepiece_like(bos=True):
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"Helowrdabcxyit', ", "▁w", "▁a", "He", "ll", "Hell", "Hello", "▁Hello"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "w"), ("▁", "a"), ("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o")]
    merges += [("▁", "Hello")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    return add_bos(tokenizer, bos)


def both(folder, tokenizer, settings, config=None):
    """The same files as Linnet and as Transformers read them."""
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "llama", **(config or {})}
    settings = {"bos_token": BOS, "eos_token": EOS, **settings}
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    text = TextFiles(
        tokenizer=tokenizer.to_str(),
        tokenizer_config=settings,
        chat_template=settings.get("chat_template"),
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return LinnetTokenizer(text, config), theirs


def added(content, **flags):
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": content, **{name: flags.get(name, False) for name in names}}


SETTINGS = [
    {"tokenizer_class": "PreTrainedTokenizerFast"},
    {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False},
    {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "add_eos_token": True},
    {"tokenizer_class": "LlamaTokenizer"},
    {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "add_bos_token": False},
    {"tokenizer_class": "LlamaTokenizer", "legacy": True},
    {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
    {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": ["<|odd|>"]},
    {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|odd|>"},
    {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("build", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("bos", [True, False])
def test_ids_and_text_are_those_of_transformers(tmp_path, build, bos, settings):
    ours, theirs = both(tmp_path, build(bos), settings)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_added_tokens_of_the_config_are_added(tmp_path):
    tokenizer = byte_level()
    start = tokenizer.get_vocab_size()
    listed = {
        str(start): added("<|odd|>", special=True, lstrip=True),
        str(start + 1): added("Hello", normalized=True),
        str(tokenizer.token_to_id("<|end|>")): added("<|end|>", special=True, rstrip=True),
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": listed}
    ours, theirs = both(tmp_path, tokenizer, settings)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.encode("Hello <|odd|>", add_special_tokens=False) == [start + 1, start]


def test_one_token_with_two_ids_is_refused():
    settings = {"added_tokens_decoder": {"5": added("<|end|>", special=True)}}
    text = TextFiles(tokenizer=byte_level().to_str(), tokenizer_config=settings)
    with pytest.raises(CheckpointError, match=r"'<\|end\|>' has id 5 in .* and 263 in"):
        LinnetTokenizer(text, {})


def test_truncation_and_padding_in_the_file_do_not_apply():
    tokenizer = byte_level(bos=False)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    assert len(LinnetTokenizer(TextFiles(tokenizer=tokenizer.to_str()), {}).encode("abcdef")) == 6


def test_no_tokenizer():
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, so it takes .* ids only"):
        LinnetTokenizer(TextFiles(), {})


def test_a_damaged_tokenizer():
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: "):
        LinnetTokenizer(TextFiles(tokenizer="{}"), {})


def changed(part, value):
    """A ``tokenizer.json`` with one part replaced, as a stranger may write it."""
    table = json.loads(byte_level().to_str())
    return json.dumps({**table, part: {**(table[part] or {}), **value}})


def test_a_tokenizer_that_makes_the_library_panic(capfd):
    text = changed("model", {"continuing_subword_prefix": "#" * 10})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: "):
        LinnetTokenizer(TextFiles(tokenizer=text), {})


def test_a_tokenizer_that_fails_on_a_text(capfd):
    pieces = [{"SpecialToken": {"id": "gone", "type_id": 0}}]
    post_processor = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [],
        "special_tokens": {},
    }
    tokenizer = LinnetTokenizer(TextFiles(tokenizer=changed("post_processor", post_processor)), {})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json fails on this text: "):
        tokenizer.encode("Hello")


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": ["<x>"]},
        {"added_tokens_decoder": {"one": {"content": "<x>"}}},
        {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}},
        {"added_tokens_decoder": {"300": "<x>"}},
        {"added_tokens_decoder": {"300": {}}},
        {"added_tokens_decoder": {"300": {"content": 7}}},
        {"extra_special_tokens": [{"special": True}]},
        {"additional_special_tokens": [["<x>"]]},
    ],
)
def test_settings_that_are_no_tokens_are_refused(settings):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        LinnetTokenizer(TextFiles(byte_level().to_str(), settings), {})


def test_text_that_is_not_unicode():
    tokenizer = LinnetTokenizer(TextFiles(tokenizer=byte_level().to_str()), {})
    with pytest.raises(RequestError, match="not text that UTF-8 can hold"):
        tokenizer.encode("a\ud800")


# Chat


MESSAGES = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": 'Hello "you" & <b>日本</b> <s>'},
    {"role": "assistant", "content": " ok", "reasoning_content": None},
    {"role": "user", "content": "12"},
]
TEMPLATE = """
{%- for message in messages %}
    {%- if loop.index0 > 9 %}{% break %}{% endif %}
    {{- '<|end|>' + message['role'] + '\n' + message.content | trim + eos_token }}
    {%- if message.reasoning_content is defined %}{{ message.reasoning_content }}{% endif %}
{%- endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|end|>assistant\n' }}
{%- endif %}
{%- generation %}{{ dict(a=1).a }}{% endgeneration %}
{{ messages[1] | tojson(indent=2) }}"""


@pytest.mark.parametrize("with_bos", [True, False])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("build", [byte_level, sentencepiece_like])
def test_chat_ids_are_those_of_transformers(tmp_path, build, add, with_bos):
    """C06: never two, and the one that is there is the template's.

    With no BOS in its template, a checkpoint gets none in chat, whatever the tokenizer adds to
    plain text: that is what Transformers does, and so what the model was trained on.
    """
    template = ("{{ bos_token }}" if with_bos else "") + TEMPLATE
    settings = {"chat_template": template, "add_bos_token": add}
    settings["tokenizer_class"] = (
        "PreTrainedTokenizerFast" if build is byte_level else "LlamaTokenizer"
    )
    ours, theirs = both(tmp_path, build(add), settings)
    for messages in (MESSAGES, MESSAGES[1:]):
        for prompt in (True, False):
            ids = ours.encode_chat(messages, add_generation_prompt=prompt)
            call = theirs.apply_chat_template(messages, add_generation_prompt=prompt)
            assert ids == call["input_ids"]
    plain = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "x"}]
    assert ours.encode_chat(plain).count(ours.bos_id) == int(with_bos)
    assert ours.encode("Hello").count(ours.bos_id) == int(add)


def test_rendered_text_is_that_of_transformers(tmp_path):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    ours, theirs = both(tmp_path, byte_level(), settings)
    tools = [{"type": "function", "function": {"name": "f", "description": "日 <&>"}}]
    rendered = theirs.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert ours.render_chat(MESSAGES, tools=tools) == rendered


def test_no_chat_template_names_the_flag():
    tokenizer = LinnetTokenizer(TextFiles(tokenizer=byte_level().to_str()), {})
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template; .*`linnet run MODEL PROMPT --raw`"):
        tokenizer.encode_chat(MESSAGES)


# End-of-text ids


def test_end_ids_are_the_union_of_three_files():
    """C05"""
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    text = TextFiles(
        tokenizer=tokenizer.to_str(),
        tokenizer_config={"eos_token": {"content": "<|end|>"}},
        generation_config={"eos_token_id": [2, 11, end]},
    )
    assert LinnetTokenizer(text, {"eos_token_id": 2}).end_ids == {
        2: ("config.eos_token_id", "generation_config.eos_token_id"),
        11: ("generation_config.eos_token_id",),
        end: ("generation_config.eos_token_id", "tokenizer_config.eos_token"),
    }


def test_no_end_ids():
    assert end_ids(TextFiles(), {"eos_token_id": None}, vocab=10) == {}


@pytest.mark.parametrize("value", [10, -1, "2", True, [2, 10], 2.0])
def test_an_end_id_outside_the_vocabulary_is_refused(value):
    text = TextFiles(generation_config={"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"generation_config\.eos_token_id has .* has 10"):
        end_ids(text, {}, vocab=10)


def test_named_special_tokens():
    settings = {
        "bos_token": {"__type": "AddedToken", "content": BOS},
        "add_bos_token": True,
        "pad_token": None,
        "extra_special_tokens": {"image": "<|image|>"},
    }
    text = TextFiles(tokenizer=byte_level().to_str(), tokenizer_config=settings)
    tokenizer = LinnetTokenizer(text, {})
    assert tokenizer.special_tokens == {"bos_token": BOS, "image": "<|image|>"}
    assert tokenizer.token_id("<|image|>") == tokenizer.vocab_size - 1


def test_added_tokens_keep_their_flags():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<x>", special=False)])
    ours = LinnetTokenizer(TextFiles(tokenizer=tokenizer.to_str()), {})
    assert ours.decode(ours.encode("a<x><|end|>")) == "a<x>"

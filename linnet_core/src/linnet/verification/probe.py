"""What an engine is asked: 60 strings to turn into token ids, and a text to give logits for."""

STRINGS = (
    # digits
    "0",
    "42",
    "1234567890",
    "3.14159",
    "1,000,000",
    "2026-12-01",
    "0x1F 0b101 1e-5",
    "5 apples, 12 pears and 144 plums",
    "v1.2.3-rc4",
    "½ ² ٣ Ⅷ",
    # contractions and apostrophes
    "it's",
    "I'm we're they've you'll he'd",
    "DON'T SHOUT, IT'S LATE",
    "rock 'n' roll",
    "the dogs' owner’s",
    "'quoted' \"double\"",
    # words
    "Hello world",
    "hello",
    " leading",
    "trailing ",
    "camelCase snake_case kebab-case",
    "antidisestablishmentarianism",
    "a",
    "A B C",
    # other scripts
    "你好，世界",
    "日本語のテキスト",
    "한국어 문장입니다",
    "Привет, мир",
    "Γειά σου Κόσμε",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "café naïve Zürich smörgåsbord",
    "İstanbul straße Łódź",
    # spaces
    " ",
    "  ",
    "    four",
    "two  spaces   three",
    "tab\there",
    "no\u00a0break",
    "wide\u3000space",
    # newlines
    "\n",
    "\n\n",
    "\n\n\n",
    "line\nline",
    "line\r\nline",
    "end\n",
    "  \n  indented\n\ttabbed",
    # emoji and symbols
    "😀",
    "👩‍👩‍👧‍👦 family",
    "🇨🇭 flag 👍🏽",
    "→ ≤ ∑ © ™ €",
    "!!! ??? ...",
    "a+b=c; x[i] -> y*2 # note",
    "def f(x):\n    return {'a': x ** 2}\n",
    "https://example.com/a?b=c&d=%20",
    # chat markers
    "<|im_start|>user\nHi<|im_end|>\n",
    "<s>[INST] Hi [/INST]</s>",
    "<|begin_of_text|><|eot_id|><start_of_turn>user\nHi<end_of_turn>",
)
"""60 of them: each is a place where tokenizers were seen to part."""

TEXT = """\
The lighthouse on the northern cape was built in 1874, after three ships were lost there in one \
winter. Its keeper wrote in a log every four hours: the wind, the height of the sea, and the \
state of the lamp. "Nothing to report," says the entry for 3 March 1891, and it was his longest.

Water boils at 100 degrees Celsius at sea level, at about 93 on a mountain of 2,000 metres, and at \
71 on the highest summit of all. That is why potatoes take so long to cook up there, and why \
nobody trusts a recipe from the valley.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

A few questions that children ask: Why is the sky blue? Where does the white go when the snow \
melts? If I dig straight down, do I come out in China? Who was the first person to say hello? It's \
hard to answer them well, and they don't accept "because".

Le train de Genève est arrivé à l'heure, mais le bus pour Zürich était déjà parti. Der nächste \
fährt um halb acht. 今日はとても寒いですね。 Мы встретились на вокзале.

Shopping list: 2 litres of milk, 12 eggs, 500 g of flour, salt, butter (unsalted), one lemon, and \
whatever fruit looks good. Total: about 23.50. Don't forget the bread!

The theorem says that every even number greater than two is the sum of two primes; no one has \
proved it, and no one has found a number for which it fails, though they have looked as far as \
4,000,000,000,000,000,000. The old professor used to say that a proof is a story which the reader \
cannot put down. Then he would erase the board, sit by the window, and wait for the bell to ring.
"""
"""A text of the kinds that models are asked for: prose, numbers, code, other languages."""

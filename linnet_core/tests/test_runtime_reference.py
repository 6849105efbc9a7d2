"""The runtime on a real program: a small Llama on the NumPy reference backend."""

import numpy as np
import pytest

from linnet.models.llama import Llama
from linnet.plugins.interfaces import LoadOptions
from linnet.plugins.manager import plugin_manager
from linnet.reference.backend import ReferenceBackend
from linnet.runtime.model import Model
from linnet.testing.fixtures import f0_config, random_checkpoint

PROMPTS = [[3], [7, 1, 99, 2, 41, 4, 60], [int(i) for i in np.arange(19) * 7 % 136]]


@pytest.fixture(scope="module")
def bound():
    return Llama().bind(random_checkpoint(f0_config(), seed=0))


@pytest.fixture(scope="module")
def load(bound):
    def make(rows=1, max_seq=64):
        options = LoadOptions(dtype="f64", rows=rows, max_seq=max_seq)
        session = ReferenceBackend().load(bound, options)
        return Model(bound, session, plugin_manager().backend("reference"))

    return make


def greedy(model, prompt, count):
    """The definition: run everything again for each token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model.session.run("forward", {"tokens": np.array([tokens], np.int32)})
        tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def test_greedy_equals_running_everything_again(load):
    model = load()
    for prompt in PROMPTS:
        result = model.generate(prompt, max_new_tokens=6, ignore_eos=True)
        assert result.tokens == greedy(model, prompt, 6)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "top_k": 30, "seed": 5}])
def test_rows_do_not_disturb_each_other(load, options):
    alone = load()
    together = load(rows=2).generate_many(PROMPTS, max_new_tokens=6, ignore_eos=True, **options)
    for prompt, result in zip(PROMPTS, together, strict=True):
        expected = alone.generate(prompt, max_new_tokens=6, ignore_eos=True, **options)
        assert result.tokens == expected.tokens


def test_a_seed_decides(load):
    model = load()
    options = {"max_new_tokens": 12, "temperature": 2.0, "ignore_eos": True}
    first = model.generate(PROMPTS[1], seed=1, **options)
    assert model.generate(PROMPTS[1], seed=1, **options).tokens == first.tokens
    assert model.generate(PROMPTS[1], seed=2, **options).tokens != first.tokens


def test_a_reused_prefix_changes_nothing(load):
    model, fresh = load(), load()
    conversation = list(PROMPTS[1])
    for turn in ([5, 9], [100], [1, 2, 3]):
        conversation += turn
        options = {"max_new_tokens": 5, "ignore_eos": True}
        reused = model.generate(conversation, reuse_prefix=True, **options)
        assert reused.tokens == fresh.generate(conversation, **options).tokens
        conversation += reused.tokens
    assert reused.reused_tokens == len(PROMPTS[1]) + 3 + 2 * 5 - 1


def test_the_context_is_used_to_its_end(load):
    model = load(max_seq=16)
    result = model.generate(PROMPTS[1], ignore_eos=True)
    assert (result.new_tokens, result.finish) == (16 - 7, "length")
    assert result.tokens == greedy(model, PROMPTS[1], 9)

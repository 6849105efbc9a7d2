"""Sampling options: every wrong value is refused with its name, itself and what is allowed."""

import pytest

from linnet.errors import RequestError
from linnet.runtime.sampling import SamplingOptions, sampling_options

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", NAN, "a number from 0 to 100"),
        ("temperature", -0.1, "a number from 0 to 100"),
        ("temperature", INF, "a number from 0 to 100"),
        ("temperature", 1e-9, "0 for greedy, or from 0.0001 to 100"),
        ("temperature", "1", "a number from 0 to 100"),
        ("top_p", 0, "a number above 0, up to 1"),
        ("top_p", 1.1, "a number above 0, up to 1"),
        ("top_p", NAN, "a number above 0, up to 1"),
        ("min_p", -0.5, "a number from 0 to 1"),
        ("min_p", 2, "a number from 0 to 1"),
        ("top_k", -1, "a whole number from 0 to 2147483647"),
        ("top_k", 1.0, "a whole number from 0 to 2147483647"),
        ("top_k", True, "a whole number from 0 to 2147483647"),
        ("max_new_tokens", 0, "a whole number from 1 to 2147483647"),
        ("max_new_tokens", -5, "a whole number from 1 to 2147483647"),
        ("seed", 2**31, "a whole number from 0 to 2147483647"),
        ("seed", -1, "a whole number from 0 to 2147483647"),
        ("stop", "", "texts of at least one character"),
        ("stop", ["a", ""], "texts of at least one character"),
        ("stop", 5, "a text or a list of texts"),
        ("stop", [5], "a text or a list of texts"),
        ("ignore_eos", 1, "true or false"),
    ],
)
def test_wrong_values(name, value, allowed):
    with pytest.raises(RequestError) as caught:
        SamplingOptions(**{name: value})
    assert str(caught.value).startswith(f"{name} is ")
    assert str(caught.value).endswith(f"; it must be {allowed}")


def test_the_default_is_greedy():
    options = SamplingOptions()
    assert options.greedy
    assert options.max_new_tokens is None
    assert not SamplingOptions(temperature=1).greedy


def test_zero_is_a_value():
    assert sampling_options({"temperature": 0, "top_k": 0, "seed": 0}).seed == 0


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",)])
def test_stop_texts_become_a_tuple(stop):
    assert SamplingOptions(stop=stop).stop == ("ab",)


def test_an_unknown_option_is_refused():
    with pytest.raises(RequestError, match=r"unknown option 'max_tokens'; .* max_new_tokens,"):
        sampling_options({"max_tokens": 3})

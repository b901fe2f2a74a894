"""Lists and articles in messages."""

from __future__ import annotations

import pytest

from tpplan.plan.wording import all_of, one_of, with_article


def test_lists_are_read_aloud() -> None:
    assert (one_of(["a"]), one_of(["a", "b", "c"])) == ("`a`", "`a`, `b` or `c`")
    assert (all_of(["a"]), all_of(["a", "b", "c"])) == ("`a`", "`a`, `b` and `c`")


@pytest.mark.parametrize(
    "name", ["Embedding", "RMSNorm", "MLP", "LSTM", "OPTModel", "XLNetModel", "HTTPClient", "int", "_Inner"]
)
def test_an_stands_before_a_vowel_as_it_is_spoken(name: str) -> None:
    assert with_article(name) == f"an `{name}`"


@pytest.mark.parametrize("name", ["Linear", "UNet", "UniSpeechModel", "GPT2Model", "T5Model", "LayerNorm", "NoneType"])
def test_a_stands_before_all_others(name: str) -> None:
    assert with_article(name) == f"a `{name}`"

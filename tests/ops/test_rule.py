"""The notation of rules: what it means, and a caret under what is wrong."""

from __future__ import annotations

import pytest

import tpplan
from tpplan.plan.operator_rule import RuleTextError, read_rule

GOOD: dict[str, tuple[set[str], set[str], set[str]]] = {
    "b h s! d!, b h t! d!, b h t! d! -> b h s! d!": ({"b", "h"}, {"s", "d", "t"}, set()),
    "... i+, o i+ -> ... o": ({"...", "o"}, set(), {"i"}),
    "b s! (k g) d!, b t! k d!, b t! k d! -> b s! (k g) d!": ({"b", "k", "g"}, {"s", "d", "t"}, set()),
    "[a b!], (), _ -> a, a": ({"a"}, {"b"}, set()),
    "(a b)! 1 -> 1": (set(), {"a", "b"}, set()),
    "a -> a": ({"a"}, set(), set()),
    "a b -> a b, _": ({"a", "b"}, set(), set()),
    "a b -> a b, a": ({"a", "b"}, set(), set()),
}
BAD = {
    "b h": ("   ^", "no arrow"),
    "a a -> a": ("  ^", "`a` is twice in a term"),
    "a -> b": ("     ^", "`b` is a dim of a result, and of no argument"),
    "a b -> a": ("  ^", "`b` is on the left alone"),
    "a -> a -> a": ("       ^^", "second arrow"),
    "a ->": ("    ^", "a term is empty"),
    "a, -> a": ("   ^^", "a term is empty"),
    "a!, a+ -> a": ("     ^", "can't be both whole and summed"),
    "a -> a+": ("      ^", "a result has no dim that is summed"),
    "a+ -> a": ("      ^", "`a` is summed, and a dim of a result"),
    "(a -> a": ("^", "the bracket isn't closed"),
    "a$ -> a": (" ^", "`$` is no name of a dim"),
    "a -> _": ("^", "`a` is on the left alone"),
    "...! a -> a": ("^^^", "`...` are plain dims"),
    "[a -> a": ("   ^^", "where a comma or `]` belongs"),
    "": ("^", "no arrow"),
}


@pytest.mark.parametrize("text", GOOD)
def test_names_are_plain_whole_or_summed(text: str) -> None:
    rule = read_rule(text)
    assert (set(rule.plain), set(rule.whole), set(rule.summed)) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_has_a_place(text: str) -> None:
    carets, message = BAD[text]
    with pytest.raises(RuleTextError) as caught:
        read_rule(text)
    assert message in str(caught.value) and caught.value.help
    assert " " * caught.value.offset + "^" * caught.value.length == carets


def test_an_error_shows_the_rule_with_a_caret() -> None:
    with pytest.raises(tpplan.OperatorRuleError) as caught:
        tpplan.register_operator("tests::attention", "b h s -> b h s q")
    assert str(caught.value).splitlines() == [
        "the rule of tests::attention:1:16: TP022 operator-rule: `q` is a dim of a result, and of no argument",
        "  | b h s -> b h s q",
        "  |                ^",
        "  help: name a dim of an argument; what the operator makes anew has a size that no rule tells",
    ]
    assert [finding.code for finding in caught.value.diagnostics] == ["TP022"]

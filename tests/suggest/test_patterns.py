import pytest

from tpplan.plan.pattern import Pattern
from tpplan.suggest.patterns import patterns_for

LAYERS = [f"h.{i}.{leaf}" for i in range(3) for leaf in ("q_proj", "k_proj", "o_proj", "norm")]


def names(*chosen: str) -> dict[str, int]:
    return {name: 1 if name.endswith(("q_proj", "k_proj")) else 2 for name in chosen}


def test_numbers_become_stars_and_siblings_braces() -> None:
    assert patterns_for(names(*LAYERS), LAYERS) == [("h.*.{q,k}_proj", 1), ("h.*.{o_proj,norm}", 2)]


def test_a_star_never_matches_more_than_was_meant() -> None:
    chosen = [name for name in LAYERS if name.startswith(("h.0", "h.2"))]
    found = patterns_for(names(*chosen), LAYERS)
    assert found == [("h.{0,2}.{q,k}_proj", 1), ("h.{0,2}.{o_proj,norm}", 2)]


@pytest.mark.parametrize("chosen", [LAYERS, LAYERS[:4], LAYERS[3:9], ["h.1.norm"]])
def test_the_patterns_match_exactly_these_modules(chosen: list[str]) -> None:
    found = [Pattern.parse(text) for text, _ in patterns_for(names(*chosen), [*LAYERS, "h", "norm"])]
    assert [n for n in [*LAYERS, "h", "norm"] if any(p.matches(n) for p in found)] == chosen


def test_hundreds_of_layers_stay_within_the_limits_of_a_pattern() -> None:
    many = [f"h.{i}.q" for i in range(400)]
    texts = [text for text, _ in patterns_for(dict.fromkeys(many[::2], 1), many)]
    assert [n for n in many if any(Pattern.parse(t).matches(n) for t in texts)] == many[::2]


def test_a_number_within_a_layer_is_kept_where_it_sets_modules_apart() -> None:
    every = [f"h.{i}.mlp.{j}" for i in range(12) for j in range(3)]
    first = [name for name in every if name.endswith(".0")]
    assert patterns_for(dict.fromkeys(first, 1), every) == [("h.*.mlp.0", 1)]
    some = ["h.0.mlp.0", "h.0.mlp.2", "h.3.mlp.2", "h.5.mlp.1"]
    found = [Pattern.parse(text) for text, _ in patterns_for(dict.fromkeys(some, 1), every)]
    assert [n for n in every if any(p.matches(n) for p in found)] == some

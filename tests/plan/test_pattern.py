import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpplan.plan import Pattern, PatternError


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("lm_head", "lm_head"),
        ("model.layers.*.mlp", "model.layers.17.mlp"),
        ("model.layer*.0", "model.layers.0"),
        ("model.*norm", "model.final_norm"),
        ("model.*norm", "model.norm"),
        ("*", "model"),
        ("**", "model.layers.0"),
        ("**", ""),
        ("**.q", "q"),
        ("**.q", "a.b.q"),
        ("a.**", "a"),
        ("a.**.b", "a.b"),
        ("a.**.b", "a.x.y.b"),
        ("**.a.**.b", "a.b.a.x.b"),
        ("{q,k}_proj", "k_proj"),
        ("{a.b,c}.d", "a.b.d"),
        ("{model.,}norm", "norm"),
        ("x.{a,b}.{c,d}", "x.b.c"),
        ("a*b*c", "abbbc"),
        ("日本.*", "日本.語"),
        ("block+1", "block+1"),
    ],
)
def test_a_pattern_matches(pattern: str, name: str) -> None:
    assert Pattern.parse(pattern).matches(name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("lm_head", "model.lm_head"),
        ("lm_head", "lm_heads"),
        ("*", "a.b"),
        ("*", ""),
        ("a.*", "a"),
        ("a.*.b", "a.b"),
        ("a.**.b", "a.bb"),
        ("**.q", "a.iq"),
        ("layer*", "layers.0"),
        ("a*b", "a.b"),
        ("a+", "aa"),
        ("{q,k}_proj", "v_proj"),
        ("a.b", "axb"),
    ],
)
def test_a_pattern_does_not_match(pattern: str, name: str) -> None:
    assert not Pattern.parse(pattern).matches(name)


@pytest.mark.parametrize(
    ("pattern", "offset", "length"),
    [
        ("", 0, 0),
        ("a..b", 2, 1),
        ("a.", 1, 1),
        (".a", 0, 2),
        ("a.***", 2, 2),
        ("a.b**", 3, 2),
        ("a.**.**", 2, 5),
        ("a{b", 1, 2),
        ("ab}", 2, 1),
        ("a{b{c}}", 3, 1),
        ("a,b", 1, 1),
        ("layers[0]", 6, 1),
        ("a b", 1, 1),
        ("{a,b}." * 8 + "x", None, 5),
        ("{a,}.b", 0, 6),
        ("x" * 513, 0, 513),
    ],
)
def test_a_bad_pattern_is_refused_at_the_very_place(pattern: str, offset: int | None, length: int) -> None:
    with pytest.raises(PatternError) as error:
        Pattern.parse(pattern)
    assert error.value.length == length
    assert offset is None or error.value.offset == offset


@pytest.mark.parametrize(
    ("winner", "loser", "name"),
    [
        ("a.b", "a.*", "a.b"),
        ("a.b", "{a,c}.b", "a.b"),
        ("a.*.c", "*.*.c", "a.b.c"),
        ("a.*.c", "a.**.c", "a.b.c"),
        ("*.b", "**.b", "a.b"),
        ("a.b*", "a.*", "a.bc"),
        ("a.bc*", "a.b*", "a.bcd"),
        ("**.*.b", "**.b", "a.b"),
        ("a.**", "**", "a"),
        ("a.b", "a.**.b", "a.b"),
        ("a.*.c", "a.b.**", "a.b.c"),
    ],
)
def test_the_closer_pattern_is_the_more_specific(winner: str, loser: str, name: str) -> None:
    closer, wider = Pattern.parse(winner).specificity(name), Pattern.parse(loser).specificity(name)
    assert closer is not None and wider is not None and closer > wider


def test_the_specificity_is_that_of_the_alternative_that_matches() -> None:
    pattern = Pattern.parse("{a.b,*.c}")
    one, other = pattern.specificity("a.b"), pattern.specificity("x.c")
    assert one is not None and other is not None and one > other
    assert pattern.specificity("x.d") is None


@pytest.mark.parametrize("pattern", ["**.a." * 20 + "b", "*a" * 60 + "b", ".".join(["*a*a*a*a*b"] * 8)])
def test_wildcards_never_backtrack_without_end(pattern: str) -> None:
    parsed = Pattern.parse(pattern)
    started = time.process_time()
    for name in (".".join(["a"] * 60), "a" * 4000, ".".join(["a" * 40] * 8)):
        assert not parsed.matches(name)
    assert time.process_time() - started < 1


SEGMENT = st.text("ab", min_size=1, max_size=3)
GLOB = st.text("ab*", min_size=1, max_size=4).filter(lambda text: "**" not in text)


@given(st.lists(st.one_of(GLOB, st.just("**")), min_size=1, max_size=5), st.lists(SEGMENT, max_size=5))
def test_matching_agrees_with_a_plain_definition(pattern: list[str], name: list[str]) -> None:
    collapsed = [part for part, after in zip(pattern, [*pattern[1:], ""], strict=True) if not part == after == "**"]
    assert Pattern.parse(".".join(collapsed)).matches(".".join(name)) == plainly(collapsed, name)


def plainly(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(plainly(pattern[1:], name[skipped:]) for skipped in range(len(name) + 1))
    return bool(name) and segment_plainly(pattern[0], name[0]) and plainly(pattern[1:], name[1:])


def segment_plainly(glob: str, text: str) -> bool:
    if not glob:
        return not text
    if glob[0] == "*":
        return any(segment_plainly(glob[1:], text[skipped:]) for skipped in range(len(text) + 1))
    return bool(text) and glob[0] == text[0] and segment_plainly(glob[1:], text[1:])

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.toy import TOY_PLAN
from tpplan.plan import Exchange, KernelChoice, KernelKind, OverlapUnit, OverlapWord, Pin, Style, check_plan, load_plan
from tpplan.plan.vocabulary import OPTIONS_BY_STYLE

SEGMENTS = st.one_of(
    st.from_regex(r"[a-z_][a-z0-9_*]{0,6}", fullmatch=True).filter(lambda text: "**" not in text),
    st.just("*"),
    st.integers(0, 9).map(str),
    st.sampled_from(["{a,b}", "null", "on", "日本"]),
)
PATTERNS = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)
NAMES = st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), min_size=2, max_size=4, unique=True)


OVERLAPS = st.one_of(
    st.sampled_from(OverlapWord).map(str),
    st.lists(st.sampled_from(OverlapUnit).map(str), unique=True),
)


@st.composite
def rules(draw: st.DrawFn) -> object:
    style = draw(st.sampled_from(Style))
    options: dict[str, object] = {"style": style.value}
    choices = {
        "input": st.sampled_from(Pin).map(str),
        "output": st.sampled_from(Pin).map(str),
        "exchange": st.sampled_from(Exchange).map(str),
        "packed": st.one_of(
            NAMES, NAMES.flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(names, st.integers(1, 99))))
        ),
        "local": NAMES,
        "overlap": OVERLAPS,
    }
    for option in sorted(OPTIONS_BY_STYLE[style]):
        if draw(st.booleans()):
            options[option] = draw(choices[option])
    return style.value if len(options) == 1 and draw(st.booleans()) else options


KINDS = st.sampled_from(KernelKind).map(str)
CHOICES = st.sampled_from(KernelChoice).map(str)
PLANS = st.fixed_dictionaries(
    {"version": st.just(1), "modules": st.dictionaries(PATTERNS, rules(), max_size=5)},
    optional={
        "name": st.text(min_size=1, max_size=9).filter(lambda text: text.isprintable() and text.strip()),
        "axis": st.sampled_from(["tp", "model"]),
        "overlap": OVERLAPS,
        "recompute_gather": st.booleans(),
        "fused_overlap": st.booleans(),
        "kernels": st.dictionaries(KINDS, CHOICES, max_size=3).flatmap(
            lambda kinds: st.dictionaries(
                PATTERNS.filter(lambda text: "." in text), st.dictionaries(KINDS, CHOICES, min_size=1), max_size=2
            ).map(lambda scopes: {**kinds, **scopes})
        ),
    },
)


@given(PLANS)
def test_a_plan_survives_being_written_and_read(data: dict[str, object]) -> None:
    plan, findings = check_plan(data)
    assert plan is not None, findings
    assert load_plan(plan.to_dict()) == plan
    assert load_plan(plan.to_yaml()) == plan


def test_a_written_plan_reads_like_a_plan_file() -> None:
    written = load_plan(TOY_PLAN).to_yaml()
    assert written.startswith("# yaml-language-server: $schema=urn:tpplan:plan:1\nversion: 1\nname: toy\naxis: tp\n")
    assert "  lm_head: {style: colwise, output: replicate}\n" in written
    assert "  model.embed_tokens: vocab\n" in written

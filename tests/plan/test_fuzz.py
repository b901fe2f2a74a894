"""Whatever is thrown at the reader, it answers with findings and with nothing else."""

from hypothesis import example, given
from hypothesis import strategies as st

from tests.plan.toy import TOY_PLAN, llama_modules
from tpplan.plan import PlanError, check_plan, load_plan
from tpplan.plan.load import check_plan as check
from tpplan.report.diagnostics import Format, render

TOKENS = "version modules extends kernels style colwise * ** &a *a !t a.b { } [ ] : - ? | > ' \" # --- ... 1 ~ é 😀"
WORDS = st.sampled_from([*TOKENS.split(), "\n", "\n  ", "\t", ": ", "- ", "? ", "%YAML 1.1", "\ufeff"])
SOUP = st.lists(WORDS, max_size=30).map("".join)
DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


def only_findings(source: object) -> None:
    try:
        plan = load_plan(source)  # type: ignore[arg-type]
    except PlanError as error:
        for format in Format:
            assert render(error.diagnostics, format, color=True)
    else:
        for finding in plan.match(llama_modules()).diagnostics:
            assert render([finding])


@given(st.text())
@example("\x85a: b")
@example("a: \ud800")
@example("%YAML 9.9\n---\na: 1")
@example("%YAML 1.11")
@example("%TAG ! x")
@example("a: &b\n*b : c")
@example('"\\ud800": 1')
@example("? - ? - ? a")
def test_arbitrary_text_yields_findings(text: str) -> None:
    only_findings(f"{text}\n")


@given(SOUP)
def test_arbitrary_yaml_yields_findings(text: str) -> None:
    only_findings(f"{text}\n")


@given(st.data())
def test_a_damaged_plan_yields_findings(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(TOY_PLAN)))
    end = data.draw(st.integers(start, min(start + 9, len(TOY_PLAN))))
    only_findings(TOY_PLAN[:start] + data.draw(SOUP) + TOY_PLAN[end:] + "\n")


@given(st.dictionaries(st.sampled_from(["version", "name", "extends", "axis", "modules", "kernels", "x"]), DATA))
def test_arbitrary_data_yields_findings(data: dict[str, object]) -> None:
    only_findings(data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_yield_findings(data: bytes) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = f"{folder}/plan.yaml"
        with open(path, "wb") as stream:
            stream.write(data)
        only_findings(path)


@given(SOUP)
def test_findings_point_into_the_text(text: str) -> None:
    lines = f"{text}\n".splitlines(keepends=True)
    for finding in check(f"{text}\n")[1]:
        if finding.span is not None:
            assert 1 <= finding.span.start.line <= len(lines) + 1
            assert (finding.span.start.line, finding.span.start.column) <= (
                finding.span.end.line,
                finding.span.end.column,
            )


def test_the_same_source_yields_the_same_findings() -> None:
    text = "version: 2\nmodules: {a: x, b..c: y, d: {z: 1}}\n"
    assert check_plan(text) == check_plan(text)

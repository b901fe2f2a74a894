"""Rules in their short and long form, and the exact token at which a mistake is reported."""

import pytest

from tpplan.plan import NamedPack, Pin, Style, check_plan, load_plan


def findings(modules: str) -> list[tuple[str, str]]:
    _, found = check_plan(f"version: 1\nmodules:\n{modules}\n")
    return [(finding.code, str(finding.span).removeprefix("<text>:")) for finding in found]


def test_the_long_form_holds_every_option_and_where_it_stands() -> None:
    text = (
        "version: 1\nmodules:\n  a.b: {style: colwise, input: replicate, output: shard, packed: [q, k], local: [n]}\n"
    )
    (rule,) = load_plan(text).rules
    assert (rule.style, rule.input, rule.output) == (Style.COLWISE, Pin.REPLICATE, Pin.SHARD)
    assert (rule.packed, rule.local) == ((NamedPack("q"), NamedPack("k")), ("n",))
    assert [str(rule.span_of(option)) for option in ("style", "output", "local")] == [
        "<text>:3:16",
        "<text>:3:51",
        "<text>:3:81",
    ]
    assert rule.origin == "<text>:3"


def test_packs_may_have_sizes() -> None:
    (rule,) = load_plan({"version": 1, "modules": {"a": {"style": "colwise", "packed": {"q": 64, "k": 16}}}}).rules
    assert rule.packed == (NamedPack("q", 64), NamedPack("k", 16))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("a: colwize", ("TP005", "3:6")),
        ("a:", ("TP004", "3:3")),
        ("a: [colwise]", ("TP004", "3:6")),
        ("a: {}", ("TP007", "3:3")),
        ("a: {style: }", ("TP004", "3:13")),
        ("a: {style: [colwise]}", ("TP004", "3:14")),
        ("a: {style: colwise, inpt: shard}", ("TP003", "3:23")),
        ("a: {style: colwise, input: gather}", ("TP021", "3:30")),
        ("a: {style: colwise, input: [shard]}", ("TP004", "3:30")),
        ("a: {style: vocab, packed: [q, k]}", ("TP020", "3:21")),
        ("a: {style: colwise, packed: q}", ("TP004", "3:31")),
        ("a: {style: colwise, packed: [q]}", ("TP021", "3:31")),
        ("a: {style: colwise, packed: [q, q]}", ("TP021", "3:35")),
        ("a: {style: colwise, packed: [q, [k]]}", ("TP004", "3:35")),
        ("a: {style: colwise, packed: {q: 0, k: 1}}", ("TP021", "3:35")),
        ("a: {style: colwise, packed: {q: many, k: 1}}", ("TP004", "3:35")),
        ("a: {style: colwise, local: num_heads}", ("TP004", "3:30")),
        ("a: {style: colwise, overlap: gather_linaer}", ("TP004", "3:32")),
        ("a: {style: colwise, local: [num heads]}", ("TP021", "3:31")),
        ("a: {style: none, input: shard}", ("TP020", "3:20")),
        ("'': colwise", ("TP008", "3:3")),
        ("a..b: colwise", ("TP009", "3:5")),
        ("'a..b': colwise", ("TP009", "3:6")),
        ("a.b**: colwise", ("TP009", "3:6")),
        ("<<: colwise", ("TP009", "3:3")),
        ("? [a]\n  : colwise", ("TP004", "3:5")),
        ("a: |\n    colwise", ("TP005", "3:6")),
    ],
)
def test_a_mistake_is_reported_at_its_own_token(rule: str, expected: tuple[str, str]) -> None:
    assert findings(f"  {rule}") == [expected]


def test_every_mistake_of_a_file_is_reported_at_once() -> None:
    _, found = check_plan(
        "verson: 1\nname: 3\nmodules:\n  a..b: x\n  c: {styl: y}\nkernels: {gelo: triton, gelu: fast}\n"
    )
    assert [finding.code for finding in found] == [
        "TP003",
        "TP007",
        "TP004",
        "TP009",
        "TP005",
        "TP007",
        "TP003",
        "TP003",
        "TP021",
    ]


@pytest.mark.parametrize(
    ("plan", "code", "help_text"),
    [
        ("version: '1'\nmodules: {a: none}\n", "TP004", "write `version: 1`"),
        ("version: 1\nmodel.norm: sequence\nmodules: {a: none}\n", "TP003", "patterns go under `modules:`"),
        ("version: 1\nname: 405\nmodules: {a: none}\n", "TP004", 'write `name: "405"`'),
        ("version: 1\nmodules: {a: {style: none, local: x}}\n", "TP004", "write `local: [x]`"),
        ("version: 1\nmodules: {a: none}\nkernels: {layernorm: auto}\n", "TP003", "did you mean `layer_norm`?"),
        ("version: 1\nmodules: {a: none}\nkernels: {gelu: Triton}\n", "TP021", "did you mean `triton`?"),
    ],
)
def test_the_help_line_is_the_fix(plan: str, code: str, help_text: str) -> None:
    _, found = check_plan(plan)
    assert (code, help_text) in [(finding.code, finding.help) for finding in found]

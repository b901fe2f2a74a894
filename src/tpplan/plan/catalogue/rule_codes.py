"""Codes of what can be wrong with the rules of a plan."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity

RULE_CODES: Final[tuple[CatalogueEntry, ...]] = (
    CatalogueEntry(
        code="TP003",
        name="unknown-key",
        severity=Severity.ERROR,
        summary="A key that the plan language doesn't know.",
        explanation="""
Ignoring a misspelt key would change what the plan means, so unknown keys are errors. A plan knows `version`, `name`,
`extends`, `axis`, `modules`, `kernels`, `operators` and `one_shot_all_reduce`; a rule in its long form
`style`, `input`, `output`, `packed` and `local`; `kernels` its kinds. Patterns go under `modules:`.
""",
        bad="""
version: 1
moduls:
  lm_head: colwise
modules:
  lm_head: {style: colwise, outputs: replicate}
""",
        good="""
version: 1
modules:
  lm_head: {style: colwise, output: replicate}
""",
    ),
    CatalogueEntry(
        code="TP004",
        name="wrong-type",
        severity=Severity.ERROR,
        summary="A value of the wrong type, such as a list where a mapping belongs.",
        explanation="""
The message says what was expected and what was found. Note that YAML reads an unquoted `12` as a number, and a key
without a value as null.
""",
        bad="""
version: 1
modules:
  - lm_head: colwise
""",
        good="""
version: 1
modules:
  lm_head: colwise
""",
    ),
    CatalogueEntry(
        code="TP005",
        name="unknown-style",
        severity=Severity.ERROR,
        summary="A style that doesn't exist.",
        explanation="""
The styles are `colwise` (a linear's output features are split), `rowwise` (its input features), `vocab` (an
embedding's rows), `experts` (each rank holds whole experts), `sequence` (the parameters stay whole, the activations are
split along the sequence), `replicate` (everything stays whole), and `none` (no rule at all: it carves an exception out
of a wider pattern, or drops an inherited rule).
""",
        bad="""
version: 1
modules:
  lm_head: columnwise
""",
        good="""
version: 1
modules:
  lm_head: colwise
""",
    ),
    CatalogueEntry(
        code="TP006",
        name="unsupported-version",
        severity=Severity.ERROR,
        summary="A version of the plan language that this tpplan doesn't read.",
        explanation="""
`version` is the version of the plan language, not of the plan. This tpplan reads version 1. Within a version, a
plan's meaning doesn't change.
""",
        bad="""
version: 2
modules:
  lm_head: colwise
""",
        good="""
version: 1
modules:
  lm_head: colwise
""",
    ),
    CatalogueEntry(
        code="TP007",
        name="missing-key",
        severity=Severity.ERROR,
        summary="A key that has to be there is missing.",
        explanation="""
Every plan needs `version`, and `modules` unless it only extends another. A rule in its long form needs `style`.
""",
        bad="""
modules:
  lm_head: {output: replicate}
""",
        good="""
version: 1
modules:
  lm_head: {style: colwise, output: replicate}
""",
    ),
    CatalogueEntry(
        code="TP008",
        name="empty-pattern",
        severity=Severity.ERROR,
        summary="A rule without a pattern.",
        explanation="""
The key of a rule is the pattern of the modules that it applies to, and this one is empty. The root module has no
name; to reach every module write `"**"`.
""",
        bad="""
version: 1
modules:
  "": replicate
""",
        good="""
version: 1
modules:
  "**": replicate
""",
    ),
    CatalogueEntry(
        code="TP009",
        name="bad-pattern",
        severity=Severity.ERROR,
        summary="A pattern that can't be read.",
        explanation="""
A pattern is segments with dots between them. `*` stands for one segment or, inside a segment, for any characters;
`**`, a segment of its own, for any number of segments; `{a,b}` for either text. An index is a segment: `layers.0`,
not `layers[0]`. Patterns aren't regular expressions.
""",
        bad="""
version: 1
modules:
  model.layers[0].mlp.up_proj: colwise
""",
        good="""
version: 1
modules:
  model.layers.0.mlp.up_proj: colwise
""",
    ),
    CatalogueEntry(
        code="TP012",
        name="unmatched-pattern",
        severity=Severity.ERROR,
        summary="A pattern that matches no module.",
        explanation="""
A rule that matches nothing leaves modules unsharded. Usually a name is misspelt, a prefix
such as `model.` is missing, or the plan is for another architecture. `print(model)` shows the names. To drop a rule
that was inherited through `extends`, give its pattern the style `none`. A rule whose own style is `none` only gets a
warning.
""",
        bad="""
version: 1
modules:
  model.layers.*.self_atn.q_proj: colwise
""",
        good="""
version: 1
modules:
  model.layers.*.self_attn.q_proj: colwise
""",
    ),
    CatalogueEntry(
        code="TP013",
        name="ambiguous-rules",
        severity=Severity.ERROR,
        summary="Two equally specific rules want different things of one module.",
        explanation="""
Of several patterns that match a module the most specific wins: the one with more segments written out in full; then
with fewer `**`; then with more segments, and more characters, written out in part; then with more segments; then with
fewer alternatives in braces. These don't decide between the two here, and the order in the file doesn't count. Name
the module in a rule of its own, or narrow one of the patterns.
""",
        bad="""
version: 1
modules:
  model.layers.*.mlp.up_proj: colwise
  model.*.0.mlp.up_proj: replicate
""",
        good="""
version: 1
modules:
  model.layers.*.mlp.up_proj: colwise
  model.layers.0.mlp.up_proj: replicate
""",
    ),
    CatalogueEntry(
        code="TP014",
        name="shadowed-rule",
        severity=Severity.WARNING,
        summary="A rule that takes effect nowhere.",
        explanation="""
The rule's pattern matches modules, but on each of them a more specific rule wins. Remove it, or widen its pattern.
""",
        bad="""
version: 1
modules:
  model.layers.*.mlp.*_proj: replicate
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
        good="""
version: 1
modules:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    ),
    CatalogueEntry(
        code="TP020",
        name="option-not-for-style",
        severity=Severity.ERROR,
        summary="An option that doesn't apply to the rule's style.",
        explanation="""
`packed` says how a projection's features are cut, so it goes with `colwise` and `rowwise` alone. `input`, `output`
and `local` go with every style but `none`, which takes no options: it means that the module has no rule.
""",
        bad="""
version: 1
modules:
  model.norm: {style: sequence, packed: [q, k]}
""",
        good="""
version: 1
modules:
  model.norm: sequence
""",
    ),
    CatalogueEntry(
        code="TP021",
        name="invalid-value",
        severity=Severity.ERROR,
        summary="A value of the right type that isn't allowed.",
        explanation="""
A pin that isn't `replicate`, `shard` or `sequence`, a kernel choice that isn't `auto`, `triton` or `torch`, a pack of
fewer than one row, fewer than two packs, a name that appears twice in a list, or an attribute name that is no
valid identifier.
""",
        bad="""
version: 1
modules:
  lm_head: {style: colwise, output: gather}
""",
        good="""
version: 1
modules:
  lm_head: {style: colwise, output: replicate}
""",
    ),
    CatalogueEntry(
        code="TP022",
        name="operator-rule",
        severity=Severity.ERROR,
        summary="A rule of an operator can't be read, or doesn't fit the operator.",
        explanation="""
A rule has a term for each tensor argument of an operator, in their order, and behind `->` one for each result. A term
names the tensor's dims. One name is one dim, wherever it stands; a plain name may be split over ranks, `!` marks what
each rank needs whole, `+` what is summed. A dim of a result is one of an argument; a name that stands on the left alone
must carry `!` or `+`. As a warning: a plan has a rule for an operator that the model doesn't call.
""",
        bad="""
tpplan.register_operator("my::attn", "b h s d, b h t d, b h t d -> b h s d")     # `t` is on the left alone
""",
        good="""
tpplan.register_operator("my::attn", "b h s! d!, b h t! d!, b h t! d! -> b h s! d!")
""",
    ),
)

"""Codes of what can be wrong with a plan file as a file: its text, its size, and what it extends."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity

FILE_CODES: Final[tuple[CatalogueEntry, ...]] = (
    CatalogueEntry(
        code="TP001",
        name="yaml-syntax",
        severity=Severity.ERROR,
        summary="The file isn't valid YAML.",
        explanation="""
A plan is one YAML 1.2 document. Reading stops at a syntax error, so what follows it in the file hasn't been checked.

The usual causes are tabs in the indentation, and a pattern that begins with `*`, `{` or `&`: YAML takes the first for
an alias, the second for a mapping and the third for an anchor. Quote such a pattern.
""",
        bad="""
version: 1
modules:
  **.o_proj: rowwise
""",
        good="""
version: 1
modules:
  "**.o_proj": rowwise
""",
    ),
    CatalogueEntry(
        code="TP002",
        name="duplicate-key",
        severity=Severity.ERROR,
        summary="A mapping has a duplicate key.",
        explanation="""
Many YAML readers silently keep the second value. tpplan reports both places instead. Remove one; if you need both, one
of the patterns is misspelt.
""",
        bad="""
version: 1
modules:
  lm_head: colwise
  lm_head: replicate
""",
        good="""
version: 1
modules:
  lm_head: colwise
""",
    ),
    CatalogueEntry(
        code="TP010",
        name="extends-not-found",
        severity=Severity.ERROR,
        summary="The plan named by `extends` doesn't exist.",
        explanation="""
`extends` takes a path, relative to the folder of the plan that contains it, or the name of a plan that ships with
tpplan, such as `llama`. A file takes precedence over a shipped name. The rest of the plan was checked without its base.
""",
        bad="""
version: 1
extends: lama.yaml
modules:
  lm_head: none
""",
        good="""
version: 1
extends: llama
modules:
  lm_head: none
""",
    ),
    CatalogueEntry(
        code="TP011",
        name="extends-cycle",
        severity=Severity.ERROR,
        summary="A plan extends itself, directly or through others.",
        explanation="""
Following `extends` leads back to a plan that is already being read. The note shows the whole cycle. Chains of more than
16 plans get the same code.
""",
        bad="""
version: 1
extends: TP011.yaml
""",
        good="""
version: 1
extends: base.yaml
""",
    ),
    CatalogueEntry(
        code="TP015",
        name="file-too-large",
        severity=Severity.ERROR,
        summary="The file is larger than any plan needs to be.",
        explanation="""
A plan of more than 1 MiB isn't read. A plan for the largest models takes a few kilobytes, since a pattern names a
module in every layer at once: `model.layers.*.mlp.up_proj`. Check that this is the right file.
""",
        bad="$ tpplan validate model.safetensors",
        good="$ tpplan validate plans/llama.yaml",
    ),
    CatalogueEntry(
        code="TP016",
        name="too-many-aliases",
        severity=Severity.ERROR,
        summary="The file's aliases or nesting expand beyond the limit.",
        explanation="""
A few lines of nested aliases can stand for billions of values. A plan may expand to 20,000 values once its aliases
are resolved, and may nest 16 levels deep; a plan needs three. Use a pattern instead of repeating rules.
""",
        bad="""
version: 1
modules:
  lm_head: {style: colwise, local: [[[[[[[[[[[[[[[[[deep]]]]]]]]]]]]]]]]]}
""",
        good="""
version: 1
modules:
  lm_head: {style: colwise}
""",
    ),
    CatalogueEntry(
        code="TP017",
        name="not-utf8",
        severity=Severity.ERROR,
        summary="The file isn't UTF-8 text.",
        explanation="""
A plan is UTF-8, with or without a byte order mark. The position is that of the first invalid byte. Save the file as
UTF-8, or check that it's a plan at all.
""",
        bad="$ tpplan validate plan-in-latin-1.yaml",
        good="$ iconv -f latin1 -t utf-8 plan-in-latin-1.yaml > plan.yaml",
    ),
    CatalogueEntry(
        code="TP018",
        name="yaml-tag",
        severity=Severity.ERROR,
        summary="The plan has a YAML tag, but plans are plain data.",
        explanation="""
In YAML a tag such as `!!python/object` can make a reader build objects and run code. tpplan rejects all
tags, even harmless ones, so that plans from any source are safe to read. Remove the tag.
""",
        bad="""
version: 1
modules:
  lm_head: !!str colwise
""",
        good="""
version: 1
modules:
  lm_head: colwise
""",
    ),
    CatalogueEntry(
        code="TP019",
        name="file-not-readable",
        severity=Severity.ERROR,
        summary="The file can't be read.",
        explanation="""
There's no readable file at the path, and it isn't the name of a shipped plan. The command
exits with 2, since it had nothing to check. A string given to `load_plan` is YAML text only if it holds a line break.
""",
        bad="$ tpplan validate lama",
        good="$ tpplan validate llama",
    ),
)

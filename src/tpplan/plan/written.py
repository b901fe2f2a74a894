"""From a plan back to plain data and to a plan file's text."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from tpplan.plan.vocabulary import Overlaps, OverlapWord

if TYPE_CHECKING:
    from tpplan.plan.plan import Plan
    from tpplan.plan.rules import KernelRule, Rule

SCHEMA_ID: Final = "urn:tpplan:plan:1"
"""The `$id` of the plan files' JSON Schema."""
SCHEMA_FILE: Final = "plan.schema.json"


def schema_comment(folder: Path | None = None) -> str:
    """The first line of a plan's file, from which editors take the schema.

    It names what TPPLAN_SCHEMA says, else `plan.schema.json` if that is in `folder`, the plan's own, else the schema's
    `$id`.
    """
    beside = folder is not None and (folder / SCHEMA_FILE).is_file()
    address = os.environ.get("TPPLAN_SCHEMA") or (SCHEMA_FILE if beside else SCHEMA_ID)
    return f"# yaml-language-server: $schema={address}\n"


def plan_to_dict(plan: Plan) -> dict[str, object]:
    """Plain data, in the order in which a plan file is written."""
    document: dict[str, object] = {"version": plan.version, "name": plan.name, "axis": plan.axis}
    document["modules"] = {rule.pattern.text: _rule(rule) for rule in plan.rules}
    if plan.kernels:
        document["kernels"] = _kernels(plan.kernels)
    if plan.operators:
        document["operators"] = {rule.name: rule.rule.text for rule in plan.operators}
    if plan.one_shot:
        document["one_shot_all_reduce"] = plan.one_shot
    if plan.overlap != OverlapWord.NONE:
        document["overlap"] = _overlap(plan.overlap)
    if plan.chunks is not None:
        document["chunks"] = plan.chunks
    if plan.recompute_gather:
        document["recompute_gather"] = True
    if plan.fused_overlap:
        document["fused_overlap"] = True
    return document


def plan_to_yaml(plan: Plan) -> str:
    """A plan file's text: a line for each rule, options in braces."""
    from ruamel.yaml import YAML

    writer = YAML()
    writer.width = 10_000
    stream = StringIO()
    cast("Any", writer).dump(_with_flow_options(plan_to_dict(plan)), stream)
    return schema_comment() + stream.getvalue()


def _rule(rule: Rule) -> object:
    options: dict[str, object] = {"style": rule.style.value}
    if rule.input is not None:
        options["input"] = rule.input.value
    if rule.output is not None:
        options["output"] = rule.output.value
    if rule.packed is not None:
        sized = any(pack.size is not None for pack in rule.packed)
        packs = {pack.name: pack.size for pack in rule.packed}
        options["packed"] = packs if sized else list(packs)
    if rule.local:
        options["local"] = list(rule.local)
    if rule.exchange is not None:
        options["exchange"] = rule.exchange.value
    if rule.overlap is not None:
        options["overlap"] = _overlap(rule.overlap)
    return options if len(options) > 1 else rule.style.value


def _overlap(overlap: Overlaps) -> object:
    return overlap.value if isinstance(overlap, OverlapWord) else [unit.value for unit in overlap]


def _kernels(kernels: tuple[KernelRule, ...]) -> dict[str, object]:
    document: dict[str, object] = {}
    for rule in kernels:
        if rule.pattern is None:
            document[rule.kind.value] = rule.choice.value
        else:
            scope = cast("dict[str, str]", document.setdefault(rule.pattern.text, {}))
            scope[rule.kind.value] = rule.choice.value
    return document


def _with_flow_options(document: dict[str, object]) -> object:
    from ruamel.yaml.comments import CommentedMap

    written: Any = CommentedMap()
    for key, value in document.items():
        written[key] = _flow_values(cast("dict[str, object]", value)) if isinstance(value, dict) else value
    return written


def _flow_values(mapping: dict[str, object]) -> object:
    from ruamel.yaml.comments import CommentedMap

    written: Any = CommentedMap()
    for key, value in mapping.items():
        if isinstance(value, dict):
            inner: Any = CommentedMap(cast("dict[str, object]", value))
            inner.fa.set_flow_style()
            written[key] = inner
        else:
            written[key] = value
    return written

"""Write: a suggestion as a plan file, with what it shards, what it leaves whole, and why, as comments.

in:  a `Suggestion`
out: YAML text that loads to an equal plan
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from tpplan.compat.modules import named_modules
from tpplan.compiler.ir.trace import Operation
from tpplan.compiler.queries import layer_of
from tpplan.plan import Plan, Style
from tpplan.plan.written import plan_to_dict, schema_comment
from tpplan.suggest.judge import all_names, rule_of
from tpplan.suggest.patterns import patterns_for, shape_of
from tpplan.suggest.roles import RoleGroup
from tpplan.suggest.settings import Suggestion
from tpplan.suggest.sharded_share import Whole, block_share, left_whole, model_share, shared_parts

_WIDTH = 110
_NO_LINEAR = "its parameters aren't those of a linear layer or of a table that the model calls"
_SMALLEST = 0.001  # of the model; what is smaller needs no word of its own


def write_plan(suggestion: Suggestion, name: str) -> str:
    """The text of a plan file called `name`."""
    lines = [*_header(suggestion), "version: 1", f"name: {name}", "axis: tp", "modules:"]
    lines += _modules(suggestion)
    return schema_comment() + "\n".join(lines) + "\n"


def _header(suggestion: Suggestion) -> Iterator[str]:
    program = suggestion.program
    if program.size == 1:
        yield from _comment(f"{program.model} over 1 rank, which has all of it: what more ranks would split.")
        return
    blocks, everything = block_share(program), model_share(program)
    yield from _comment(f"{program.model} over {program.size} ranks: found by data flow, and proved by the compiler.")
    yield from _comment(
        f"Sharded: {blocks.percent:.1f}% of the parameters of the repeated blocks, "
        f"{everything.percent:.1f}% of all {everything.total:,}."
    )
    counted = ", ".join(f"{count} {what}" for what, count in sorted(program.count_collectives().items()))
    yield from _comment(f"A forward and backward: {counted or 'no collectives'}.")
    if suggestion.sequence:
        yield from _comment(f"Not sequence-parallel: {suggestion.sequence}")
    yield from _left_whole(suggestion, everything.total)
    shared = [f"{whole.pattern} ({_percent(whole.count, everything.total)})" for whole in shared_parts(program)]
    if shared:
        yield from _comment("Some heads are used by several ranks, and stored on each of these: " + ", ".join(shared))


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total:.1f}%"


def _left_whole(suggestion: Suggestion, total: int) -> Iterator[str]:
    held = left_whole(suggestion.program)
    listed = [whole for whole in held if whole.matrices and whole.count >= _SMALLEST * total]
    if listed:
        yield from _comment("Left whole on every rank:")
    for whole in listed:
        yield from _comment(
            f"- {whole.pattern} ({_percent(whole.count, total)}): {reason_for(suggestion, whole)}", indent=2
        )
    rest = sum(whole.count for whole in held) - sum(whole.count for whole in listed)
    if rest:
        yield from _comment(f"Norms, biases and other small parameters ({100 * rest / total:.2f}%) are whole as well.")


def reason_for(suggestion: Suggestion, whole: Whole) -> str:
    """Why these modules stay whole."""
    reasons = suggestion.reasons
    if isinstance(dict(named_modules(suggestion.subject.model)).get(whole.example), nn.RNNBase):
        return "each step would have to gather the state that the step before has made (a `colwise` rule does that)"
    setting = suggestion.settings.get(whole.example)
    if setting is not None and setting.style is Style.COLWISE:
        return "it makes a single head, which every rank needs"
    if setting is not None and setting.style is Style.REPLICATE:
        return "each rank takes its part of the result"
    if layer_of(f"{whole.example}.") in suggestion.settings:
        return "of what a weight is computed of, these count nothing that is split"
    layer = layer_of(f"{whole.example}.") or whole.example
    alike = (reason for name, reason in reasons.items() if shape_of(name) == shape_of(layer))
    own = (reason for name, reason in reasons.items() if name.rpartition(".")[0] == layer)  # a parameter's
    return reasons.get(layer) or next(alike, None) or next(own, None) or _kind(suggestion, layer)


def _kind(suggestion: Suggestion, layer: str) -> str:
    """Why modules stay whole that nothing was asked of."""
    module = dict(named_modules(suggestion.subject.model)).get(layer)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "its channels stay whole"
    if isinstance(module, nn.Embedding):
        return "the model doesn't call this table, or not with inputs of its own"
    return _NO_LINEAR if module is None or _is_reached(suggestion, layer) else "the call doesn't reach it"


def _is_reached(suggestion: Suggestion, name: str) -> bool:
    """Whether the example calls a module, or reads one of its parameters without that."""
    trace = suggestion.subject.trace
    held = {value for value, names in trace.stored.items() if any(n.rpartition(".")[0] == name for n in names)}
    frames = list(trace.root.walk())
    read = (i for frame in frames for node in frame.body if isinstance(node, Operation) for i in node.inputs)
    return any(frame.module == name for frame in frames) or not held.isdisjoint(read)


def _modules(suggestion: Suggestion) -> Iterator[str]:
    names = all_names(suggestion.subject.model)
    place = {name: position for position, name in enumerate(names)}
    merged: dict[str, list[RoleGroup]] = {}
    for group in suggestion.groups:
        merged.setdefault(group.title, []).append(group)
    first = {title: min(place[n] for g in groups for n in g.settings) for title, groups in merged.items()}
    for title in sorted(merged, key=lambda title: first[title]):
        settings = {name: setting for group in merged[title] for name, setting in group.settings.items()}
        ordered = {name: settings[name] for name in sorted(settings, key=lambda name: place[name])}
        yield from (f"  {line}" for line in _comment(title))
        for pattern, setting in patterns_for(ordered, names):
            yield f"  {_quoted(pattern)}: {_options(plan_to_dict(Plan(rules=(rule_of(pattern, setting),))))}"


def _options(document: dict[str, object]) -> str:
    (value,) = cast("dict[str, Any]", document["modules"]).values()
    return _flow(value)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{key}: {_flow(held)}" for key, held in items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, cast("list[Any]", value))) + "]"
    return str(value)


def _quoted(pattern: str) -> str:
    return f'"{pattern}"' if pattern[0] in "*{" or ": " in pattern else pattern


def _comment(text: str, indent: int = 0) -> Iterable[str]:
    plain = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(
        plain, _WIDTH, initial_indent="# " if not indent else "#   ", subsequent_indent="# " + " " * 2 * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip

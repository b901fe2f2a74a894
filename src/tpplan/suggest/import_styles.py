"""Import: a dict of styles, as torch's `parallelize_module` takes it, in tpplan's words.

in:  a model, and styles by pattern
out: a Plan; notes on what the compiler places by itself; findings for what no rule says

    "layers.*.q_proj": ColwiseParallel()                               ->   colwise
    "lm_head": ColwiseParallel(output_layouts=Replicate())             ->   {style: colwise, output: replicate}
    "tok_embeddings": RowwiseParallel(output_layouts=Shard(1))         ->   {style: vocab, output: sequence}
    "layers.*.attention": PrepareModuleInput(…)                        ->   a note: inputs are placed by the compiler
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from tpplan.compat.modules import named_modules
from tpplan.plan import CompileError, Diagnostic, Plan, Severity, load_plan
from tpplan.plan.pattern import Pattern, PatternError
from tpplan.plan.wording import one_of, with_article

_PREPARED: Final = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
_KNOWN: Final = (ColwiseParallel, RowwiseParallel, SequenceParallel, *_PREPARED)
_LAST, _SEQUENCE = Shard(-1), Shard(1)


class _Unsaid(Exception):
    """No rule says this."""


def import_styles(model: nn.Module, styles: Mapping[Any, Any]) -> tuple[Plan, tuple[Diagnostic, ...]]:
    """The plan that says what the styles say.

    Raises:
        CompileError: TP217, with each entry that no rule says.
    """
    modules = dict(named_modules(model, remove_duplicate=False))
    rules: dict[str, dict[str, str]] = {}
    notes, findings = list[Diagnostic](), list[Diagnostic]()
    for pattern, style in styles.items():
        try:
            meant = _meant(str(pattern), modules)
            if isinstance(style, _PREPARED):
                notes.append(_left(str(pattern), style, "the compiler places what modules are given and hand out"))
                continue
            rule, left = _rule(style, meant)
            rules[str(pattern)] = rule
            notes += [_left(str(pattern), style, left)] if left else []
        except (_Unsaid, PatternError) as error:
            text = error.message if isinstance(error, PatternError) else str(error)
            findings.append(Diagnostic("TP217", f"`{pattern}`: {text}", help=_WAY_OUT, subject=str(pattern)))
    if not findings and not rules:
        message = "none of the styles splits a parameter"
        findings.append(Diagnostic("TP217", message, help='write `"auto"` to have a plan found'))
    if findings:
        raise CompileError(findings)
    return load_plan({"version": 1, "name": "parallelize_module", "modules": rules}), tuple(notes)


_WAY_OUT: Final = "remove the entry, or write a plan's rule in place of the style: see `tpplan.load_plan`"


def is_style(held: object) -> bool:
    """Whether it is a style of torch, or a class of them, which stands where one of it was meant."""
    return isinstance(held, ParallelStyle) or (isinstance(held, type) and issubclass(held, ParallelStyle))


def _meant(text: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    if not text:
        raise _Unsaid("a style of the whole model has no name to go by; name the modules inside of it")
    if any(sign in text for sign in "?[]"):
        raise _Unsaid("a pattern has `*` for a segment, and neither `?` nor `[…]`")
    pattern = Pattern.parse(text)
    return [module for name, module in modules.items() if pattern.matches(name)]


def _rule(style: Any, meant: Iterable[nn.Module]) -> tuple[dict[str, str], str]:
    """The rule that says what a style says, and what of it is left to the compiler; raises `_Unsaid`."""
    if type(style) not in _KNOWN:
        if isinstance(style, type):
            raise _Unsaid(f"`{style.__name__}` is a class of styles: write `{style.__name__}()`")
        known = one_of(kind.__name__ for kind in _KNOWN)
        came = type(style).__name__ if isinstance(style, ParallelStyle) else repr(style)
        raise _Unsaid(f"`{came}` isn't {known}")
    if isinstance(style, SequenceParallel):
        (dim,) = style.sequence_sharding
        if dim != _SEQUENCE:
            raise _Unsaid(f"`sequence` splits dim 1, not {dim}")
        return {"style": "sequence"}, ""
    tables = any(isinstance(module, nn.Embedding) for module in meant)
    layouts: Any = style
    given, made = _only(layouts.input_layouts), _only(layouts.output_layouts)
    if isinstance(style, ColwiseParallel):
        pins, left = _output(made, {_LAST: "", Replicate(): "replicate"}), _left_input(given, Replicate())
        return {"style": "colwise"} | pins, left
    pins = _output(made, {Replicate(): "", _SEQUENCE: "sequence"})
    if tables:
        return {"style": "vocab"} | pins, _left_input(given, Replicate(), _LAST)
    if given not in (_LAST, Replicate()):
        raise _Unsaid(f"the input of a row-wise layer is split along its features or sliced, not {given}")
    return {"style": "rowwise"} | ({"input": "shard"} if given == Replicate() else {}) | pins, ""


def _only(layouts: Iterable[Placement]) -> Placement:
    (layout,) = layouts
    return layout


def _output(made: Placement, known: Mapping[Any, str]) -> dict[str, str]:
    for layout, pin in known.items():
        if made == layout:
            return {"output": pin} if pin else {}
    raise _Unsaid(f"a result can't be handed out as {made}; {one_of(map(str, known))} can")


def _left_input(given: Placement, *usual: Placement) -> str:
    return "" if given in usual else f"the input comes as the compiler places it, not as {given} because of this"


def _left(pattern: str, style: object, why: str) -> Diagnostic:
    return Diagnostic(
        "TP217",
        f"`{pattern}`: what {with_article(type(style).__name__)} says of layouts is left out: {why}",
        help="nothing is wrong; `tpplan explain` and the program show where each collective stands",
        subject=pattern,
        severity=Severity.NOTE,
    )


__all__ = ["import_styles", "is_style"]

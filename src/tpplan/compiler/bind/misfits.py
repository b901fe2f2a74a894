"""Misfits: rules that can't be carried out on a module, seen from the module alone.

in:  a module and the rule that the plan has for it
out: TP101 for a style that isn't for such a module, TP112 for what the module does, TP114 for a pin against the style
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from tpplan.compat.modules import computed_weights, named_modules, own_buffers, own_parameters, parametrized_tensors
from tpplan.compiler.bind.linear import is_convolution, is_grouped_convolution, linear_form
from tpplan.compiler.bind.recurrent_layers import is_recurrent, obstacle
from tpplan.compiler.bind.tables import is_table
from tpplan.compiler.ir.assembly import assemblies_of
from tpplan.plan import Diagnostic, Pin, Rule, Style
from tpplan.plan.wording import all_of, with_article

_LAYERS = ("Linear", "Embedding")  # names of torch's own, which other classes have as well
_REMOVED_BY = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}


def misfit(module: nn.Module, name: str, rule: Rule, around: nn.Module | None) -> Diagnostic | None:
    """What keeps a rule from being carried out on this module, seen from it and from the module around it alone."""
    if is_recurrent(module) and rule.style in (Style.COLWISE, Style.ROWWISE):
        return _computed_weight(module, name, rule) or _recurrent(module, name, rule)
    table = rule.style is Style.VOCAB or isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    if rule.style in (Style.COLWISE, Style.ROWWISE) and parametrized_tensors(module) and not table:
        return _input_of_other_features(name, rule)  # the trace tells what its weight is computed of
    if rule.style in (Style.COLWISE, Style.ROWWISE, Style.VOCAB):
        computed = _computed_weight(module, name, rule)
        if computed is not None:
            return computed
    if rule.style in (Style.COLWISE, Style.ROWWISE):
        if rule.style is Style.COLWISE and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return _whole_table(module, name, rule)
        form = linear_form(module)
        grouped = rule.style is Style.COLWISE and is_grouped_convolution(module)
        if form is None and not grouped and not is_convolution(module):
            return _mismatch(module, name, rule, f"`{rule.style}` splits a linear layer")
        # Whether the features can be shared out depends on what the model does with them, see `packing`.
        return None if form is None else _input_of_other_features(name, rule)
    if rule.style is Style.VOCAB:
        if isinstance(module, nn.EmbeddingBag):
            return _whole_table(module, name, rule) or _largest(module, name, rule)
        if not isinstance(module, nn.Embedding) or not is_table(module):
            return _mismatch(module, name, rule, "`vocab` splits an embedding table by rows")
        return _whole_table(module, name, rule)
    if rule.style is Style.EXPERTS and not holds_experts(module):
        found = _mismatch(module, name, rule, "`experts` shares out experts that are stacked in tensors, or in a list")
        if isinstance(around, (nn.ModuleList, nn.ModuleDict)):
            found = replace(found, help=f"name the list instead: `{name.rpartition('.')[0]}: experts`")
        return found
    return None


def _computed_weight(module: nn.Module, name: str, rule: Rule) -> Diagnostic | None:
    """TP112 for a weight that a parametrization, or a hook before each forward, computes from other parameters."""
    if parametrized_tensors(module):
        return not_followed(module, name, rule)
    leaf, hook = next(iter(computed_weights(module).items()), ("", None))
    if not leaf:
        return None
    kind = type(hook).__name__
    remove = f"`torch.nn.utils.{_REMOVED_BY[kind]}({_last(name)})`" if kind in _REMOVED_BY else "removing the hook"
    if isinstance(hook, BasePruningMethod):
        remove = (
            f'`torch.nn.utils.prune.remove({_last(name)}, "{leaf}")`; or keep the mask in a parametrization, which '
            "multiplies each rank's part"
        )
    return _computed(name, rule, leaf, f"the hook `{kind}`", remove)


def not_followed(module: nn.Module, name: str, rule: Rule) -> Diagnostic:
    """TP112 for a weight that a parametrization computes of what can't be split with it."""
    leaf, steps = next(iter(parametrized_tensors(module).items()))
    remove = f'`torch.nn.utils.parametrize.remove_parametrizations({_last(name)}, "{leaf}")`'
    return _computed(name, rule, leaf, f"the parametrization `{type(steps[0]).__name__}`", remove)


def of_whole_parts(name: str, rule: Rule, parts: Iterable[str], other: Style | None) -> Diagnostic:
    """TP112 for a layer whose own forward computes its weight of what can't be split with it.

    Args:
        name, rule: the layer, and what the plan says of it.
        parts: what it computes its weight of.
        other: a style by which these could be split, as numbers that lie flat, row after row, can by rows alone.
    """
    held = all_of(sorted(parts))
    return Diagnostic(
        code="TP112",
        message=f"`{name}` computes its weight in each forward, and no dim of {held} stands for the features "
        f"that `{rule.style}` splits, and for these alone",
        span=rule.style_span,
        help=(f"make `{name}` `{other}`, which {held} can be split by, or " if other is not None else "")
        + f"remove the rule, so that `{name}` stays whole",
        subject=name,
    )


def _computed(name: str, rule: Rule, leaf: str, what: str, remove: str) -> Diagnostic:
    return Diagnostic(
        code="TP112",
        message=f"`{name}.{leaf}` isn't a parameter: {what} computes it in each forward, and `{rule.style}` has "
        "nothing to split",
        span=rule.style_span,
        help=f"turn it into a plain parameter first, by {remove}, or remove the rule, so that `{name}` stays whole",
        subject=name,
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2] if not name.rpartition(".")[2].isdigit() else "module"


def _whole_table(table: nn.Embedding | nn.EmbeddingBag, name: str, rule: Rule) -> Diagnostic | None:
    """TP112 for a table of which a lookup changes, or counts, more than the part of one rank."""
    if table.max_norm is not None:
        what = f"has `max_norm={table.max_norm:g}`: a lookup rewrites the rows that it reads"
    elif table.scale_grad_by_freq:
        what = "has `scale_grad_by_freq=True`: its gradient divides by how often each id occurs"
    elif table.sparse:
        what = "has `sparse=True`: its gradient is a sparse tensor"
    else:
        return None
    return Diagnostic(
        code="TP112",
        message=f"`{name}` {what}, which isn't supported for a table that is split",
        span=rule.style_span,
        help=f"remove the rule, so that `{name}` stays replicated",
        subject=name,
    )


def _largest(bags: nn.EmbeddingBag, name: str, rule: Rule) -> Diagnostic | None:
    """TP112 for bags whose largest entries are wanted: these are no sums over the ranks."""
    if bags.mode != "max":
        return None
    return Diagnostic(
        code="TP112",
        message=f"`{name}` takes the largest entries of the rows in a bag, which no sum over ranks that have some of "
        "the rows is",
        span=rule.style_span,
        help=f"make `{name}` `colwise`, which splits its columns, or remove the rule, so that it stays whole",
        subject=name,
    )


def _recurrent(module: nn.Module, name: str, rule: Rule) -> Diagnostic | None:
    """What keeps a rule from splitting the hidden state of a recurrent layer."""
    kind, whole = with_article(type(module).__name__), f"remove the rule, so that `{name}` stays whole"
    if rule.style is Style.ROWWISE:
        return Diagnostic(
            code="TP101",
            message=f"`rowwise` can't split `{name}`, {kind}: each gate is a function of its products, which would be "
            "sums over the ranks",
            span=rule.style_span,
            help=f"make `{name}` `colwise`, which splits its hidden state, or {whole}",
            subject=name,
        )
    reason = obstacle(module)
    if reason:
        return Diagnostic(
            code="TP112",
            message=f"the hidden state of `{name}`, {kind}, can't be split: it {reason}",
            span=rule.style_span,
            help=whole,
            subject=name,
        )
    if rule.packed is not None:
        return Diagnostic(
            code="TP106",
            message=f"`packed` isn't for `{name}`, {kind}: its gates are known, and each is split by itself",
            span=rule.span_of("packed"),
            help="remove `packed`",
            subject=name,
        )
    if rule.input not in (None, Pin.REPLICATE):
        return Diagnostic(
            code="TP114",
            message=f"each rank computes its features of `{name}` from all features of all steps, but "
            f"`input: {rule.input}` gives it a part of its input",
            span=rule.span_of("input"),
            help="remove the pin",
            subject=name,
        )
    return None


def _input_of_other_features(name: str, rule: Rule) -> Diagnostic | None:
    """TP114 for an input pin that leaves a rank without the features that its shard of the weight multiplies."""
    if rule.style is Style.ROWWISE and rule.input in (Pin.REPLICATE, Pin.SEQUENCE):
        needs = "each rank multiplies its own part of the input's features"
        way_out = "remove the pin, or write `input: shard`"
    elif rule.style is Style.COLWISE and rule.input is Pin.SHARD:
        needs = "each rank multiplies all of the input's features"
        way_out = f"remove the pin, or make `{name}` `rowwise`"
    else:
        return None
    gives = "only a part of them" if rule.input is Pin.SHARD else "all of them"
    return Diagnostic(
        code="TP114",
        message=f"`{name}` is `{rule.style}`, so {needs}, but `input: {rule.input}` gives it {gives}",
        span=rule.span_of("input"),
        help=way_out,
        subject=name,
    )


def holds_experts(module: nn.Module) -> bool:
    """Whether a module is a list of modules, or has matrices of its own that are stacked."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return len(module) > 0
    return any(held is not None and held.dim() >= 3 for held in own_parameters(module).values())


def may_wrap(module: nn.Module) -> bool:
    """Whether a module that is no layer holds layers, or matrices, of which one may do its work."""
    if isinstance(module, nn.Embedding) or linear_form(module) is not None:
        return False
    if any(held is not None and held.dim() == 2 for held in own_parameters(module).values()):
        return True
    return any(isinstance(inner, nn.Embedding) or linear_form(inner) is not None for inner in module.modules())


def may_compute(module: nn.Module) -> bool:
    """Whether a module that is no layer by its class may compute the weight of one."""
    stored = (*own_parameters(module).values(), *own_buffers(module).values())
    return any(held is not None and (held.dim() >= 2 or is_coded(held.shape, held.dtype)) for held in stored)


def is_coded(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a stored tensor holds what stands for numbers: integers, several to a byte or not, or one-byte floats."""
    numbers = dtype.is_floating_point or dtype.is_complex
    return bool(shape) and dtype is not torch.bool and (not numbers or dtype.itemsize == 1)


def _mismatch(module: nn.Module, name: str, rule: Rule, what: str) -> Diagnostic:
    own, held = type(module), next(iter(assemblies_of(module).values()), None)
    if held is not None:
        return Diagnostic(
            code="TP101",
            message=f"{what}, but the class of `{name}.{held.leaf}`, {with_article(type(held.example).__name__)}, "
            "shows no product with what it keeps: it calls a kernel that has no rule, or isn't called",
            span=rule.style_span,
            help="remove the rule, so that it stays whole; or quantise so that its class multiplies by matrix products",
            subject=name,
        )
    foreign = own.__name__ in _LAYERS and not own.__module__.startswith("torch.")
    kind = with_article(f"{own.__module__}.{own.__name__}" if foreign else own.__name__)
    return Diagnostic(
        code="TP101",
        message=f"{what}, but `{name}` is {kind}",
        span=rule.style_span,
        label=f"`{name}` is {kind}",
        help=_suggest_style(module, name),
        subject=name,
    )


def _suggest_style(module: nn.Module, name: str) -> str:
    if linear_form(module) is not None:
        return "a linear layer can be `colwise` or `rowwise`"
    if is_convolution(module):
        return "a convolution can be `colwise` or `rowwise`"
    if is_grouped_convolution(module):
        return "a convolution in groups can be `colwise`"
    if is_recurrent(module):
        return "a recurrent layer can be `colwise`"
    if isinstance(module, nn.Embedding):
        return "an embedding table can be `vocab` or `colwise`"
    if isinstance(module, nn.EmbeddingBag):
        return "a table whose rows are reduced can be `vocab` or `colwise`"
    linears = [name for name, inner in named_modules(module) if linear_form(inner) is not None]
    if linears:
        return f"name the linear layers inside it, such as `….{linears[0]}`"
    if any(isinstance(inner, nn.Embedding) for inner in module.modules()):
        return f"write `{name}: replicate`: what wraps the table reads all of it"
    if any(isinstance(held, torch.Tensor) and held.dim() > 1 for held in vars(module).values()):
        return (
            "if it multiplies by a tensor that it keeps, register that by `register_buffer`; else a module of this "
            "kind can be `sequence` or `replicate`"
        )
    return "a module of this kind can be `sequence` or `replicate`"


__all__ = ["holds_experts", "is_coded", "may_compute", "may_wrap", "misfit", "not_followed", "of_whole_parts"]

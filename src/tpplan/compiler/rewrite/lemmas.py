"""Lemmas: whether a body is exactly what the runtime's own, written by hand, computes in its place.

in:  the record of a call, operation by operation
out: `ExactProduct`, or whether it is an exact look-up; nothing for a body that does anything more, or less

    addmm(b, x.view(-1, k), W.t()).view(…, n)     ->  ExactProduct(transposed=False, bias=True)
    addmm(b, x.view(-1, k), W.t(), beta=0.5)      ->  None: its own code runs, and is placed like any other body
    embedding(W, ids, padding_idx)                ->  a look-up

Every operation of the record must be one of the few below, with the operands and numbers that it has there. So there is
nothing that could be missed: one that isn't accounted for is the end of the lemma.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from tpplan.compat.modules import named_modules, own_parameters
from tpplan.compiler.bind.bind import Binding, Bound, bind_parameters, once
from tpplan.compiler.bind.linear import LinearForm
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.look_ups import LOOK_UPS
from tpplan.compiler.ir.trace import Frame, Operation, Reference, Trace
from tpplan.ops.dim_map import order_of
from tpplan.plan import Diagnostic, Style

_Kind = Literal["input", "weight", "bias", "product", "sum"]


@dataclass(frozen=True, slots=True)
class _Term:
    """What a value is: the input's rows, the weight, the bias, their product, or that with the bias added.

    Attributes:
        kind: which of these.
        turned: of the weight, whether it is transposed; of a product, whether it is with the weight as it is stored.
    """

    kind: _Kind
    turned: bool = False


@dataclass(frozen=True, slots=True)
class ExactProduct:
    """A body that is x Wᵀ or, if `transposed`, x W; with the bias added once, or not at all."""

    transposed: bool
    bias: bool


def exact_product(flow: DataFlow, frame: Frame, module: nn.Module) -> ExactProduct | None:
    """The product that a call of `module` is; None if it is anything else."""
    trace = flow.trace
    if not _is_plain_call(flow, frame, module):
        return None
    terms = {frame.entries[0].target: _Term("input")}
    for node in frame.body:
        assert isinstance(node, Operation)
        for value in node.inputs:
            terms.setdefault(value, _parameter(trace, value, frame.module) or _Term("input", turned=True))
        made = _made(trace, node, terms)
        if made is None:
            return None
        terms |= made
    result = terms.get(frame.exits[0].source)
    x, y = (trace.values[i].shape for i in (frame.entries[0].target, frame.exits[0].source))
    if result is None or result.kind not in ("product", "sum") or not x or y[:-1] != x[:-1] or len(x) != len(y):
        return None
    return ExactProduct(result.turned, result.kind == "sum")


def exact_lookup(flow: DataFlow, frame: Frame, module: nn.Module) -> bool:
    """Whether a call of the embedding `module` is a look-up in its table, as its attributes say, and nothing else.

    Its class may scale all rows by numbers: a row of zeros, which a rank has for another's, stays one.
    """
    if not _is_plain_call(flow, frame, module):
        return False
    place = next((i for i, n in enumerate(frame.body) if _is_lookup(n)), None)
    if place is None:
        return False
    node, others = frame.body[place], [*frame.body[:place], *frame.body[place + 1 :]]
    assert isinstance(node, Operation)
    ids, padding = frame.entries[0].target, getattr(module, "padding_idx", None)
    wanted = (Reference(node.inputs[0]), Reference(ids), -1 if padding is None else padding, False, False)
    given = (*node.arguments, *(-1, False, False)[len(node.arguments) - 2 :])
    own = _parameter(flow.trace, node.inputs[0], frame.module) == _Term("weight")
    if not own or node.keywords or given != wanted:
        return False
    return _scaled(flow.trace, [n for n in others if isinstance(n, Operation)], node) == frame.exits[0].source


def _is_lookup(node: Operation | Frame) -> bool:
    return isinstance(node, Operation) and node.is_a("row look-up")


def _scaled(trace: Trace, nodes: list[Operation], lookup: Operation) -> int | None:
    """The value that the rows are at last; None if anything is done to them but to scale them all alike."""
    (rows,) = lookup.outputs
    for node in nodes:
        made = node.outputs[0]
        if made is None or len(node.outputs) > 1 or rows is None:
            return None
        factors = [trace.values[i] for i in node.inputs if i != rows]
        if any(len(held.shape) or held.differentiable for held in factors):
            return None
        if rows not in node.inputs and node.is_a("cast", "alias"):
            continue
        same = (
            trace.values[made].shape == trace.values[rows].shape
            and trace.values[made].dtype == trace.values[rows].dtype
        )
        if not node.is_a("scaling") or node.inputs.count(rows) != 1 or node.keywords or not same:
            return None
        rows = made
    return rows


def may_write(trace: Trace, module: nn.Module) -> bool:
    """Whether the code of a module may change attributes or globals, as none that takes its place would."""
    return bool(trace.effects.written) and not type(module).forward.__module__.startswith("torch.nn.modules.")


def _is_plain_call(flow: DataFlow, frame: Frame, module: nn.Module) -> bool:
    """Whether a call takes one tensor, runs operations alone, and leaves one new tensor, and that to its caller."""
    if may_write(flow.trace, module):
        return False
    if len(frame.entries) != 1 or len(frame.exits) != 1 or not frame.body or frame.exits[0].path or frame.backwards:
        return False
    entry, leaving = frame.entries[0], frame.exits[0]
    if entry.path != _only_argument(type(module)) or entry.aliases or leaving.aliases:
        return False
    return all(isinstance(node, Operation) and _stays(flow, frame, node) for node in frame.body)


@functools.cache
def _only_argument(kind: type[nn.Module]) -> tuple[str] | None:
    """The path of the argument of a forward that takes no other."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    return (parameters[0].name,)


def _stays(flow: DataFlow, frame: Frame, node: Operation) -> bool:
    """Whether what an operation makes is read in its own frame alone, has the gradient that it should, and is new."""
    trace = flow.trace
    if node.overwritten:
        return False
    differentiable = any(trace.values[i].differentiable for i in node.inputs)
    for value in (o for o in node.outputs if o is not None):
        held = trace.values[value]
        if held.dtype.is_floating_point and held.differentiable != differentiable:
            return False
        if value in trace.gradients.gradless or value in flow.written:
            return False
        if value in trace.effects.kept or value in flow.left:
            return False
        if any(reader is not frame for reader, _ in flow.operations.get(value, ())):
            return False
        if set(flow.targets.get(value, ())) - {c.target for c in frame.exits}:
            return False
    return True


def _parameter(trace: Trace, value: int, module: str) -> _Term | None:
    """What a parameter is to its module."""
    prefix = f"{module}." if module else ""
    names = trace.parameters.get(value, ())
    if f"{prefix}weight" in names and len(trace.values[value].shape) == 2:
        return _Term("weight")
    return _Term("bias") if f"{prefix}bias" in names and len(trace.values[value].shape) == 1 else None


def _made(trace: Trace, node: Operation, terms: dict[int, _Term]) -> dict[int, _Term] | None:
    """What an operation makes of terms; None for one that has no place in a product."""
    (made,) = node.outputs if len(node.outputs) == 1 else (None,)
    if made is None or any(trace.values[i].dtype != trace.values[made].dtype for i in node.inputs):
        return None
    shapes = [trace.values[i].shape for i in (*node.inputs, made)]
    held = [terms[i] for i in node.inputs]
    if any(term == _Term("input", turned=True) for term in held):
        return None  # it reads what is neither the argument nor a parameter of its own
    if len(held) == 1:
        found = _rearranged(node, held[0], *shapes)
    elif node.is_a("two factors") and [term.kind for term in held] == ["input", "weight"]:
        found = _Term("product", not held[1].turned)
    elif node.is_a("sum and product") and [term.kind for term in held] == ["bias", "input", "weight"]:
        found = _Term("sum", not held[2].turned) if _is_plain_sum(node) else None
    elif node.is_a("plus") and {term.kind for term in held} == {"product", "bias"}:
        product = held[0] if held[0].kind == "product" else held[1]
        fits = shapes[2] == shapes[held.index(product)]
        found = _Term("sum", product.turned) if fits and _is_plain_sum(node) else None
    else:
        found = None
    return None if found is None else {made: found}


def _rearranged(node: Operation, term: _Term, before: tuple[int, ...], after: tuple[int, ...]) -> _Term | None:
    """A view of a term: of rows, one that keeps the features apart; of the weight, its transpose."""
    if node.is_a("alias"):
        return term
    if term.kind == "weight":
        if not node.is_a("transposition") or len(before) != 2:
            return None
        turns = order_of(node.target, node.arguments, 2) == [1, 0]
        return replace(term, turned=term.turned ^ turns)
    keeps = node.is_a("reshape", "copy") and bool(after) and before[-1:] == after[-1:]
    return term if keeps and term.kind != "bias" else None


def _is_plain_sum(node: Operation) -> bool:
    """Whether each operand stands once in the sum, and nothing else does."""
    count = 2 if node.is_a("plus") else 3
    tensors = all(isinstance(a, Reference) for a in node.arguments)
    return tensors and len(node.arguments) == count and all(
        name in ("alpha", "beta") and factor == 1 for name, factor in node.keywords.items()
    )  # fmt: skip


# -- what follows for a plan ------------------------------------------------------------------------------------------
def justify(model: nn.Module, flow: DataFlow, binding: Binding) -> tuple[Binding, list[Diagnostic]]:
    """Let the modules run their own code of which a call isn't what the runtime's body computes.

    Returns:
        The binding, in which these are `walked`; and findings on tables, of which only the look-up can be split.
    """
    frames: dict[str, list[Frame]] = {}
    for frame in flow.trace.root.walk():
        frames.setdefault(frame.module, []).append(frame)
    modules, found = dict(named_modules(model)), dict(binding.modules)
    findings: list[Diagnostic] = []
    for name, bound in binding.modules.items():
        calls = frames.get(name, []) if _has_written_body(bound) else []
        inexact = next((frame for frame in calls if not _is_exact(flow, frame, modules[name], bound)), None)
        if inexact is None:
            continue
        found[name] = replace(bound, walked=True)
        if bound.style is Style.VOCAB and not _looks_up_rows(inexact):
            findings.append(_no_lookup(bound, inexact))
    if found == binding.modules:
        return binding, []
    return bind_parameters(model, found)[0], once(findings)


def _looks_up_rows(frame: Frame) -> bool:
    """Whether a body's look-ups are recorded as functions over the rows of its table."""
    return any(isinstance(node, Operation) and node.target in LOOK_UPS for node in frame.body)


def _has_written_body(bound: Bound) -> bool:
    linear = isinstance(bound.form, LinearForm) and bound.style in (Style.COLWISE, Style.ROWWISE)
    return not bound.is_parameter and (linear or bound.style is Style.VOCAB)


def _is_exact(flow: DataFlow, frame: Frame, module: nn.Module, bound: Bound) -> bool:
    if bound.style is Style.VOCAB:
        return exact_lookup(flow, frame, module)
    product = exact_product(flow, frame, module)
    if product is None or not isinstance(bound.form, LinearForm) or product.transposed != bound.form.transposed:
        return False
    return product.bias == (own_parameters(module).get("bias") is not None)  # the runtime adds a bias that is there


def _no_lookup(bound: Bound, frame: Frame) -> Diagnostic:
    nodes = [node for node in frame.body if isinstance(node, Operation) and not node.is_a("row look-up")]
    shown = f" ({nodes[0].name})" if nodes else ""
    where = (f"in `{bound.name}`, at {nodes[0].location}",) if nodes and nodes[0].location is not None else ()
    return Diagnostic(
        code="TP112",
        message=f"`{bound.name}` does more than look up rows in its table{shown}, and only the look-up can be split by "
        "rows",
        span=bound.rule.style_span,
        help="do the rest in the module that calls it, or remove the rule, so that the table stays replicated",
        notes=where,
        subject=bound.name,
    )


__all__ = ["ExactProduct", "exact_lookup", "exact_product", "justify", "may_write"]

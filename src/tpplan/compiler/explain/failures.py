"""Explain a failure: turn what stopped a pass into a diagnostic at a line of the plan, with the fix.

in:  a failed placement, or a failed check
out: `Diagnostic`
"""

from __future__ import annotations

from dataclasses import replace

from tpplan.compiler.bind.bind import Binding, Bound
from tpplan.compiler.bind.packing import packed_option
from tpplan.compiler.check.lessons import equal_modules
from tpplan.compiler.check.same_steps import CheckInput, Mismatch
from tpplan.compiler.explain.origins import Cause, Origins
from tpplan.compiler.ir.dataflow import DataFlow
from tpplan.compiler.ir.heads import fitting_ranks
from tpplan.compiler.ir.layout import REPLICATED, Layout
from tpplan.compiler.ir.locations import Location
from tpplan.compiler.ir.region import CallNode, Instance, OperationNode, Region
from tpplan.compiler.ir.trace import ForeignBackward, Trace, quoted
from tpplan.compiler.place.solution import Failure
from tpplan.compiler.rules.propagate import Refusal
from tpplan.compiler.trace.backward import REENTRANT
from tpplan.ops.declared import registering, rule_of
from tpplan.plan import Diagnostic, Pin, Style

_ALONG = "can't run on a part of the sequence"
_SHOWN = 4  # ranks' parts in a message
_FROZEN = "; if it isn't trained, call `model.requires_grad_(False)`, as no gradient goes through what it keeps then"
_REENTERED = "pass `use_reentrant=False`, with which autograd sees all that the checkpoint calls; or "


def with_one_cause(findings: list[Diagnostic]) -> list[Diagnostic]:
    """Without what follows from a write in place: operations of the same body that meet the same shards.

    Nor what follows from a weight that can't be computed; of its steps the first that can't be made counts. Nor what
    a `sequence` rule does to further operations of a body, of which the first counts.
    """
    written = {(found.subject, found.span) for found in findings if found.code == "TP113"}
    findings = [found for found in findings if found.code != "TP107" or (found.subject, found.span) not in written]
    computed = {found.subject: found for found in reversed(findings) if found.code == "TP112"}
    along = {found.subject: found for found in reversed(findings) if _ALONG in found.message}
    return [found for found in findings if (computed | along).get(found.subject, found) is found]


def instance_at(instance: Instance, path: tuple[int, ...]) -> Instance:
    """The instance that positions of calls lead to."""
    for position in path:
        calls = [i for i, node in enumerate(instance.region.nodes) if isinstance(node, CallNode)]
        instance = instance.children[calls.index(position)]
    return instance


def of_placement(instance: Instance, failure: Failure, trace: Trace, binding: Binding, size: int) -> Diagnostic:
    """For a body, or a boundary, that no layout suits."""
    here = instance_at(instance, failure.path)
    finding = _of_placement(here, failure, trace, binding, size)
    experts = _experts_around(here.frame.module, binding, size)
    if experts is None or finding.code not in ("TP107", "TP114"):
        return finding
    way_out = (
        "split the whole expert: `colwise` for the layers that make its features, `rowwise` for those that read them; "
        f"or remove the rule for `{experts.name}`{_line(experts)}, so that all ranks share each expert and can gather"
    )
    return replace(finding, help=way_out)


def _experts_around(module: str, binding: Binding, size: int) -> Bound | None:
    """The rule for the experts that a module is part of, if some of the ranks share each of these."""
    for bound in binding.modules.values():
        if bound.style is Style.EXPERTS and module.startswith(f"{bound.name}."):
            inside = (other for name, other in binding.modules.items() if name.startswith(f"{bound.name}."))
            return bound if any(0 < other.group[1] < size for other in inside) else None
    return None


def _sequence_around(here: Instance, operand: int, trace: Trace, binding: Binding) -> Bound | None:
    """The `sequence` rule for a module, or for the nearest around it, if that is all that an operand is split by."""
    module = here.frame.module
    while module and module not in binding.modules:
        module = module.rpartition(".")[0]
    bound = binding.modules.get(module)
    if bound is None or bound.style is not Style.SEQUENCE:
        return None
    entries = (crossing.target for f in trace.root.walk() if f.module == module for crossing in f.entries)
    inside = Origins(DataFlow(trace), binding).rule_behind(here.values[operand], up_to=frozenset(entries))
    return bound if inside is None else None


def _of_placement(here: Instance, failure: Failure, trace: Trace, binding: Binding, size: int) -> Diagnostic:
    module = quoted(here.frame.module)
    refusal = failure.refusal
    node = None if failure.node is None else here.region.nodes[failure.node]
    cause = _culprit(here, node, refusal, trace, binding)
    bound = binding.modules.get(here.frame.module) if cause is None else cause.bound
    option, parameter = ("", "") if cause is None else (cause.option, cause.parameter)
    if refusal.kind == "dispatch" and bound is not None:
        return _undispatched(here, binding.modules.get(here.frame.module) or bound, refusal, trace.batch)
    if refusal.kind == "pin" or not isinstance(node, OperationNode):
        return _pin(here, refusal, bound, binding, size)
    split = _sharded_operand(here.region, node, refusal)
    along = None if split is None else _sequence_around(here, split[0], trace, binding)
    if along is not None:
        return _finding("TP107", along, module, node.location,
            f"the body of {module} {_ALONG}: {node.name} {refusal.reason}",
            f"remove the rule for `{along.name}`{_line(along)}, so that it gets the whole sequence",
            _operands(here.region, refusal),
        )  # fmt: skip
    if refusal.kind == "in-place":
        return _finding("TP113", bound, module, node.location,
            f"{module} writes in place ({node.name}) to a sharded tensor that it also reads through a view",
            f"write out of place in the model, or keep the value whole: {_whole(bound, option)}",
            _operands(here.region, refusal),
            option=option,
        )  # fmt: skip
    given = registering(node.target)
    if refusal.kind == "unaudited":
        return _finding("TP127", bound, module, node.location,
            f"{module} calls {node.name} on a sharded or partial value, "
            f"{'an operator that has no rule' if given else 'an operator outside of the audited table'}",
            f"say how it works on parts, with its dims for each argument: `{given}`; or "
            f"{_way_out(bound, module, refusal, option, parameter)}"
            if given else _way_out(bound, module, refusal, option, parameter),
            _operands(here.region, refusal),
            option=option,
        )  # fmt: skip
    if split is not None and node.is_a("split", "unbind", "select", "slice") and bound is not None:
        return _packed(here, node, bound, split)
    if split is not None and node.is_a("reshape") and refusal.kind == "no-rule" and _heads_of(here, node, split) > 1:
        return _heads(here, node, bound, split, size)
    hidden = node.is_a("largest", "smallest") and any(
        b.name == REENTRANT for f in trace.root.walk() for b in f.backwards
    )
    way_out = _way_out(bound, module, refusal, option, parameter)
    if refusal.kind == "gradient" and not DataFlow(trace).written.isdisjoint(trace.buffers):
        way_out += _FROZEN
    return _finding("TP107", bound, module, node.location,
        f"the body of {module} can't run on local shards: {node.name} {refusal.reason}{_shares(here.region, split)}",
        (_REENTERED if hidden else "") + way_out,
        _operands(here.region, refusal),
        option=option,
    )  # fmt: skip


def _undispatched(here: Instance, bound: Bound, refusal: Refusal, batch: int) -> Diagnostic:
    """Tokens are to go to the ranks with their experts, and aren't split."""
    return Diagnostic(
        code="TP146",
        message=f"`{here.frame.module}` is to get its tokens all-to-all, which takes tokens, choices and weights that "
        "are split along the sequence",
        span=bound.rule.span_of("exchange"),
        help="write `sequence` for the norms around the mixture, whose router then runs on split tokens, or remove "
        "`exchange`"
        if batch > 1
        else "give example inputs with a batch of 2 or more, so that the sequence shows, or remove `exchange`",
        notes=tuple(note for note in (_operands(here.region, refusal),) if note),
        subject=here.frame.module,
    )


def _finding(
    code: str,
    bound: Bound | None,
    module: str,
    location: Location | None,
    message: str,
    way_out: str,
    *notes: str,
    option: str = "",
) -> Diagnostic:
    where = (f"in {module}, at {location}",) if location is not None else ()
    return Diagnostic(
        code=code,
        message=message,
        span=bound.rule.span_of(option) if bound is not None else None,
        label=f"sharded here, read by {module}" if bound is not None and quoted(bound.name) != module else "",
        help=way_out,
        notes=(*where, *(note for note in notes if note)),
        subject=module.strip("`"),
    )


def _operands(region: Region, refusal: Refusal) -> str:
    shown = [f"{list(region.values[i].shape)} {held}" for i, held in refusal.operands]
    return "its operands: " + "; ".join(shown) if shown else ""


def _shares(region: Region, split: tuple[int, Layout] | None) -> str:
    """Which entries of a split dim the ranks have, where they don't share it evenly."""
    pack = next((pack for pack in split[1].packs if pack.parts or pack.replicas > 1), None) if split else None
    if split is None or pack is None:
        return ""
    dim, text = split[1].dim or 0, "each part on several ranks"
    if pack.parts:
        held = [f"{start}-{start + length - 1}" for start, length in pack.parts[:_SHOWN]]
        text = ", ".join([*held, *(["…"] if len(pack.parts) > _SHOWN else [])])
        text += ", some of them several times" if pack.is_shared else ", not evenly"
    return f"; of the {region.values[split[0]].shape[dim]} entries of dim {dim} the ranks hold {text}"


def _way_out(bound: Bound | None, module: str, refusal: Refusal, option: str, parameter: str) -> str:
    if bound is not None and option == "input":
        return _unpinned(bound)
    if bound is not None and (bound.is_parameter or (parameter and not bound.walked)):
        return _unruled(bound, parameter or bound.name)
    if refusal.kind == "gradient":
        return (
            "the two values must get the same layout before they meet: make the value's producer a module with a rule, "
            f"or remove the rule that shards the other one{_line(bound)}"
        )
    if bound is not None and bound.walked and f"`{bound.name}`" == module:
        return (
            f"{module} computes more than its product, and that can't be done with a rank's part of it: do it in the "
            f"module that calls {module}, after the ranks' sum, or remove the rule{_line(bound)}"
        )
    if bound is None:
        return f"shard the inputs of {module} differently, or leave them replicated"
    if bound.style is Style.SEQUENCE:
        return f"write `output: replicate` for `{bound.name}`, or remove its rule{_line(bound)}"
    return f"write `output: replicate` for `{bound.name}` to gather its result first, or remove its rule{_line(bound)}"


def _unruled(bound: Bound, parameter: str) -> str:
    return f"remove the rule for `{bound.wrapper or bound.name}`{_line(bound)}, so that `{parameter}` stays whole"


def _unpinned(bound: Bound) -> str:
    return f"remove `input` from the rule for `{bound.name}`{_line(bound)}, and the compiler finds a layout"


def _whole(bound: Bound | None, option: str) -> str:
    if bound is None:
        return "remove the rules that shard it"
    if option == "input":
        return _unpinned(bound)
    if bound.is_parameter:
        return _unruled(bound, bound.name)
    return f"write `output: replicate` for `{bound.name}`, or remove its rule{_line(bound)}"


def _line(bound: Bound | None) -> str:
    return f" ({bound.rule.origin})" if bound is not None and bound.rule.origin else ""


def _culprit(
    here: Instance, node: OperationNode | CallNode | None, refusal: Refusal, trace: Trace, binding: Binding
) -> Cause | None:
    """What made an operand what it is: a pin rather than a rule that is as good without it.

    Of an operator with a rule, a parameter rather than what can be gathered in front of it.
    """
    origins = Origins(DataFlow(trace), binding)
    behind = (origins.cause_behind(here.values[n]) for n, held in refusal.operands if not held.is_replicated)
    found = [cause for cause in behind if cause is not None]
    declared = isinstance(node, OperationNode) and rule_of(node.name) is not None
    first = next((cause for cause in found if cause.parameter and declared), next(iter(found), None))
    return next((cause for cause in found if cause.option), first)


def _sharded_operand(region: Region, node: OperationNode, refusal: Refusal) -> tuple[int, Layout] | None:
    return next(((i, held) for i, held in refusal.operands if held.is_sharded and i in node.inputs), None)


def _pin(here: Instance, refusal: Refusal, bound: Bound | None, binding: Binding, size: int) -> Diagnostic:
    name = here.frame.module
    own = binding.modules.get(name) or bound
    region = here.region
    number, held = next(iter(refusal.operands), (None, None))
    boundary = next((b for b in (*region.entries, *region.exits) if number in (b.source, b.target)), None)
    if number is None or held is None or boundary is None:
        what, why = f"{quoted(name)} can't take or return the layout that the plan asks for", ""
    else:
        outward = boundary in region.exits
        asked = _asked(own, boundary.pin, outward)
        shape = list(region.values[number].shape)
        what = f"{'the result' if outward else 'the input'} of {quoted(name)}, of shape {shape}, can't be {asked}"
        shared = own is not None and 0 < own.group[1] < size
        unmet = _unmet(boundary.pin, region.values[number].shape, held, size)
        why = ": some of the ranks share the expert, and they exchange nothing inside" if shared else f": {unmet}"
    option = "output" if boundary is not None and boundary in region.exits else "input"
    pinned = own is not None and getattr(own.rule, option) is not None
    by_style = own is not None and own.style is Style.SEQUENCE
    return Diagnostic(
        code="TP114",
        message=what + why,
        span=None if own is None else own.rule.span_of(option) if pinned else own.rule.style_span,
        label="asked for here" if own is not None else "",
        help="give example inputs whose sequence the axis divides, or remove the rule"
        if by_style and (not pinned or (boundary is not None and boundary.pin is Pin.SEQUENCE))
        else f"remove `{option}`, and the compiler finds a layout"
        if pinned
        else "remove the rule, or pin the layout before it",
        subject=name,
    )


def _asked(own: Bound | None, pin: Pin | None, outward: bool) -> str:
    option = None if own is None else own.rule.output if outward else own.rule.input
    if option is not None:
        return f"`{option}`"
    return f"`{own.style}`" if own is not None and pin is not None else "what the plan asks for"


def _unmet(pin: Pin | None, shape: tuple[int, ...], held: Layout, size: int) -> str:
    """What a layout requires that a value of this shape doesn't have."""
    if pin is Pin.SEQUENCE and len(shape) > 2 and shape[1] % size:
        return f"dim 1 is the sequence, and {size} ranks can't split its {shape[1]} positions evenly"
    if pin is Pin.SEQUENCE and len(shape) < 3:
        return f"it has no sequence dim that {size} ranks can split evenly, as (batch, sequence, hidden) has"
    if pin is Pin.SHARD and shape and shape[-1] < size:
        return f"the last dim has {shape[-1]} features for {size} ranks"
    if pin is Pin.SHARD:
        return f"a bias of all {shape[-1]} features is added to it" if shape else "it has no dim"
    return f"no collective makes that out of {held}"


def _packed(here: Instance, node: OperationNode, bound: Bound, split: tuple[int, Layout]) -> Diagnostic:
    number, held = split
    if here.region.values[number].parameter is not None and bound.style is Style.VOCAB:
        return _read_itself(here, node, bound)
    whole = here.region.values[number].shape[held.dim or 0]
    parts = [here.region.values[o].shape for o in node.outputs if o is not None]
    sizes = [shape[held.dim] for shape in parts if held.dim is not None and len(shape) > held.dim]
    shown = ", ".join(map(str, sizes)) if sizes else "parts"
    return Diagnostic(
        code="TP106",
        message=f"{quoted(here.frame.module)} takes the result of `{bound.name}` apart ({node.name} of {whole} into "
        f"{shown}): it packs several projections, and a plain split cuts across them",
        span=bound.rule.style_span,
        label="splits the packed rows as if they were one projection",
        help=f"write `{{style: {bound.style}, {packed_option(sizes)}}}` to split each by itself"
        if len(sizes) > 1 and sum(sizes) == whole
        else f"name what it packs by `packed: {{q: …, k: …}}` with sizes, or remove the rule, so that `{bound.name}` "
        "stays whole",
        notes=(f"in {quoted(here.frame.module)}, at {node.location}",) if node.location is not None else (),
        subject=bound.name,
    )


def _read_itself(here: Instance, node: OperationNode, bound: Bound) -> Diagnostic:
    return Diagnostic(
        code="TP112",
        message=f"{quoted(here.frame.module)} reads entries of the weight of `{bound.name}` itself ({node.name}), "
        "of which each rank has its part alone",
        span=bound.rule.style_span,
        label=f"`{bound.style}` splits it",
        help=f"remove the rule, so that `{bound.name}` stays whole; or read the entries by a call of `{bound.name}`",
        notes=(f"in {quoted(here.frame.module)}, at {node.location}",) if node.location is not None else (),
        subject=bound.name,
    )


def _heads_of(here: Instance, node: OperationNode, split: tuple[int, Layout]) -> int:
    """Into how many heads a view takes the sharded dim apart; 1 where it joins dims instead."""
    number, held = split
    source = here.region.values[number].shape
    (output,) = (o for o in node.outputs if o is not None)
    shape = here.region.values[output].shape
    position = next((i for i, (a, b) in enumerate(zip(source, shape, strict=False)) if a != b), held.dim or 0)
    return shape[position] if position < len(shape) else 1


def _heads(
    here: Instance, node: OperationNode, bound: Bound | None, split: tuple[int, Layout], size: int
) -> Diagnostic:
    number, held = split
    features, heads = here.region.values[number].shape[held.dim or 0], _heads_of(here, node, split)
    return _finding("TP103", bound, quoted(here.frame.module), node.location,
        f"{quoted(here.frame.module)} views {features} features as {heads} heads, which the axis doesn't divide",
        f"{fitting_ranks(heads, size)}, or remove the rules for this module{_line(bound)}",
    )  # fmt: skip


def of_check(given: CheckInput, mismatch: Mismatch, binding: Binding) -> Diagnostic:
    """For a body that does something else on local shapes than on whole tensors."""
    name, module = mismatch.frame.module, quoted(mismatch.frame.module)
    operation = mismatch.operation
    origins = Origins(DataFlow(given.trace), binding)
    bound: Bound | None = None
    for value in operation.inputs if operation is not None else ():
        layout = given.assignment.layouts.get(value)
        if layout is not None and layout.is_sharded:
            bound = bound or origins.rule_behind(value)
    bound = bound or binding.first_inside(name)
    shapes = ""
    if mismatch.expected is not None and mismatch.found is not None:
        shapes = f": expected {list(mismatch.expected)}, got {list(mismatch.found)}"
    more = len(equal_modules(given.instance, mismatch.frame)) - 1
    return _finding("TP107", bound, module, operation.location if operation is not None else None,
        f"the body of {module} doesn't compute on local shards what it computes on whole tensors: "
        f"{mismatch.reason}{shapes}",
        mismatch.way_out or f"remove the rules for the modules inside {module}{_line(bound)}; if the body counts heads "
        "or features with an attribute, name it in `local:`",
        f"the same holds for {more} more modules" if more > 0 else "",
    )  # fmt: skip


def of_backward(given: CheckInput, mismatch: Mismatch, backward: ForeignBackward, binding: Binding) -> Diagnostic:
    """For code in the backward that isn't right on a rank's part of the gradients."""
    name, module = mismatch.frame.module, quoted(mismatch.frame.module)
    origins = Origins(DataFlow(given.trace), binding)
    split = (v for v in (*backward.inputs, *backward.outputs) if v is not None)
    bounds = (origins.rule_behind(v) for v in split if given.assignment.layouts.get(v, REPLICATED) != REPLICATED)
    bound = next((found for found in bounds if found is not None), None) or binding.first_inside(name)
    operation = mismatch.operation
    location = operation.location if operation is not None and operation.location is not None else None
    more = len(equal_modules(given.instance, mismatch.frame)) - 1
    met = f"met in {module}, at {backward.location}" if backward.location is not None else ""
    return _finding("TP128", bound, module, location,
        f"{backward.name} can't be proved for the layouts around it: {mismatch.reason}",
        f"{_REENTERED if backward.name == REENTRANT else ''}call it on whole tensors: write `output: replicate` for "
        "the module whose result it gets, or `input: "
        f"replicate` for the one that it stands in; or remove the rules around it{_line(bound)}",
        met if met and location != backward.location else "",
        f"the same holds for {more} more modules" if more > 0 else "",
    )  # fmt: skip


__all__ = ["instance_at", "of_backward", "of_check", "of_placement", "with_one_cause"]

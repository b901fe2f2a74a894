"""Later calls: a model that keeps what its first call made, such as a table, runs by one program from then on.

in:  a model whose second call runs other operations than its first, the program of the first and that of the second
out: nothing if they are one program; TP129 if they aren't; what one model can't store for both
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from tpplan.compiler.ir.hidden import is_of_plain
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, Layout
from tpplan.compiler.ir.program import ModuleProgram, Program
from tpplan.compiler.ir.pytree import tensors_in
from tpplan.compiler.ir.replaced_bodies import RecordedBody
from tpplan.compiler.ir.trace import Trace, quoted
from tpplan.compiler.trace.capture import Capture, record
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.sequel import without_records
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.slots import Slot, slots_of
from tpplan.compiler.trace.surroundings import Space, Surroundings, other_files
from tpplan.plan import CompileError, Diagnostic


@contextmanager
def after_a_call(
    model: nn.Module, trace: Trace, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Generator[nn.Module]:
    """The model as a call like the traced one leaves it, without numbers; so are its surroundings in the block."""
    around = Surroundings(model)
    try:
        skeleton = make_skeleton(model)
        record(skeleton, arguments, keywords, Capture(Recorder(trace.settings)), around)
        with other_files():
            yield without_records(skeleton.model)
    finally:
        around.restore()


@contextmanager
def before_any_call(model: nn.Module) -> Generator[bool]:
    """In the block, what functions of the model and around it fill with tensors is empty; whether any of it wasn't."""
    around = Surroundings(model)
    tables = ((name, table) for name, table in around.tables() if not is_of_plain(table))
    found = [(name, table) for name, table in tables if any(map(_is_of_tensors, table.values()))]
    names = [slot for _, slot in slots_of(model, around).tensors() if _is_a_name(slot)]
    put, entered = around.written() if found or names else (set[str](), set[str]())
    filled = [(table, dict(table)) for name, table in found if name in entered]
    names = [slot for slot in names if slot.key in put]
    for table, before in filled:
        for key in [key for key, held in before.items() if _is_of_tensors(held)]:
            table.pop(key, None)  # it may have several names
    for slot in names:
        slot.put(None)
    try:
        with other_files() if filled or names else nullcontext():
            yield bool(filled or names)
    finally:
        for table, before in filled:
            made = {key: held for key, held in table.items() if key not in before}
            table.clear()
            table.update(before | made)
        for slot in names:
            slot.put(slot.value)


def _is_of_tensors(held: object) -> bool:
    return not (isinstance(held, dict) or is_of_plain(held)) and any(True for _ in tensors_in([held]))


def _is_a_name(slot: Slot) -> bool:
    """Whether a tensor is what an attribute or a global stands for."""
    dict_of_names = isinstance(slot.holder, Space) or slot.setter is object.__setattr__
    own = slot.setter is operator.setitem and isinstance(slot.holder, dict) and "_parameters" in slot.holder
    return slot.value.dim() > 0 and (dict_of_names or own)


def refuse_difference(program: Program, other: Program) -> None:
    """Raise if the program of later calls isn't that of the first."""
    name = _differing(program, other)
    if name is None:
        return
    finding = Diagnostic(
        code="TP129",
        message=f"what the model computes depends on how often it was called before: {quoted(name)} runs other "
        "operations in its second call than in its first, and needs other reshards for them",
        help="let it make what it keeps when it is built, or in each call; or call it once before `parallelize`",
        subject=name,
    )
    raise CompileError([finding])


Reason = tuple[str, str]  # where a call does something else, and the way out
EMPTY_PARTS: Reason = (
    "some of the numbers by which rows are split are 0",
    "leave out what is done with an empty part, and do nothing instead",
)
OTHER_COUNTS: Reason = (
    "few entries are found, none, or all",
    "let what is done not depend on how many entries `nonzero`, `torch.where` or a mask finds",
)


def refuse_other_rows(program: Program, other: Program | None, steered: bool, reason: Reason) -> None:
    """Raise if a call of other rows has another program, or none, or is `steered` by more."""
    name = None if other is None else _differing(program, other)
    if name is None and not steered:
        return
    where, way_out = reason
    message = f"{quoted(name or '')} does something else where {where}"
    raise CompileError([Diagnostic(code="TP110", message=message, help=way_out, subject=name)])


def _differing(program: Program, other: Program) -> str | None:
    """A module of which another program says something else; "" if only parameters lie otherwise, None if none do."""
    first = {module.name: _content(module) for module in program.modules}
    name = next((m.name for m in other.modules if m.calls and first.get(m.name) != _content(m)), None)
    read = {name for module in other.modules for name in module.reads}
    placed = {p.names: (p.layout, p.summed) for p in program.parameters}
    moved = (placed.get(p.names) != (p.layout, p.summed) for p in other.parameters if read.intersection(p.names))
    return "" if name is None and any(moved) else name


def placement_difference(program: Program, other: Program) -> str:
    """What a model would have to store otherwise for `other` than for `program`; "" if both can serve it."""
    read = {name for module in other.modules for name in module.reads}
    placed = {p.names: _stored(p.layout) for p in program.parameters}
    for parameter in other.parameters:
        ours, theirs = placed.get(parameter.names), _stored(parameter.layout)
        if read.intersection(parameter.names) and theirs != ours:
            return f"`{parameter.name}` would need layout {theirs} for it, and has {ours}"
    return ""


def _content(module: ModuleProgram) -> tuple[object, ...]:
    moves = (frozenset((r.path, r.source, r.target) for r in held) for held in (module.entries, module.exits))
    kept = (
        module.local_attributes,
        type(module.body) if isinstance(module.body, RecordedBody) else module.body,
        module.random,
        module.class_calls,
    )
    return (*moves, *kept)


def _stored(layout: Layout) -> Layout:
    """How a parameter is stored: a bias that one rank adds is whole on all of them."""
    return REPLICATED if layout == PARTIAL else layout


__all__ = [
    "EMPTY_PARTS",
    "OTHER_COUNTS",
    "after_a_call",
    "before_any_call",
    "placement_difference",
    "refuse_difference",
    "refuse_other_rows",
]

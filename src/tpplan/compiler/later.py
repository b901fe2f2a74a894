"""Later calls: a model that keeps what its first call made, such as a table, runs by one program from then on.

in:  a model whose second call runs other operations than its first, the program of the first and that of the second
out: nothing if they are one program; TP129 if they aren't
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from tpplan.compiler.ir.program import ModuleProgram, Program
from tpplan.compiler.ir.trace import Trace, quoted
from tpplan.compiler.trace.capture import Capture, record
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.sequel import without_records
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.plan import CompileError, Diagnostic


@contextmanager
def after_a_call(
    model: nn.Module, trace: Trace, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Generator[nn.Module]:
    """The model as a call like the traced one leaves it, without numbers; so are its surroundings in the block."""
    around = Surroundings(model)
    try:
        skeleton = make_skeleton(model)
        record(
            skeleton,
            arguments,
            keywords,
            trace.training,
            Capture(Recorder.like(trace)),
            around,
        )
        yield without_records(skeleton.model)
    finally:
        around.restore()


def refuse_difference(program: Program, other: Program) -> None:
    """Raise if the program of later calls isn't that of the first."""
    first = {module.name: _content(module) for module in program.modules}
    name = next((m.name for m in other.modules if m.calls and first.get(m.name) != _content(m)), None)
    read = {name for module in other.modules for name in module.reads}
    placed = {p.names: (p.layout, p.summed) for p in program.parameters}
    differs = name is not None or any(
        placed.get(p.names) != (p.layout, p.summed) for p in other.parameters if read.intersection(p.names)
    )
    if differs:
        where = quoted(name or "")
        finding = Diagnostic(
            code="TP129",
            message=f"what the model computes depends on how often it was called before: {where} runs other operations "
            "in its second call than in its first, and needs other reshards for them",
            help="let it make what it keeps when it is built, or in each call; or call it once before `parallelize`",
            subject=name,
        )
        raise CompileError([finding])


def _content(module: ModuleProgram) -> tuple[object, ...]:
    moves = (frozenset((r.path, r.source, r.target) for r in held) for held in (module.entries, module.exits))
    kept = (
        module.local_attributes,
        module.recorded is None,
        module.split_norm,
        module.random,
        module.class_calls,
        module.experts,
    )
    return (*moves, *kept)


__all__ = ["after_a_call", "refuse_difference"]

"""The pipeline: from a model and a plan to a program, pass by pass.

    bind -> capture -> regions -> place -> assign -> emit -> check
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tpplan.compiler.assign import Assignment, assign
from tpplan.compiler.bind import bind
from tpplan.compiler.capture import capture
from tpplan.compiler.emit import emit
from tpplan.compiler.layout import REPLICATED
from tpplan.compiler.place import Constraints, Failure, Placer, root_solution
from tpplan.compiler.propagate import Propagator
from tpplan.compiler.region import build_regions
from tpplan.compiler.program import Program
from tpplan.compiler.skeleton import make_skeleton
from tpplan.cost.communication import NVLINK
from tpplan.plan import CompileError, Plan, Severity, Style


def compile_program(
    model: nn.Module, plan: Plan, size: int, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Program:
    binding, diagnostics = bind(model, plan, size)
    if any(d.severity is Severity.ERROR for d in diagnostics):
        raise CompileError(diagnostics)
    trace = capture(make_skeleton(model), arguments, keywords, True)
    constraints = Constraints(sequence=any(b.style is Style.SEQUENCE for b in binding.modules.values()))
    instance = build_regions(trace, binding)
    placer = Placer(Propagator(size), NVLINK, constraints)
    solutions = placer.solve(instance.region, tuple(REPLICATED for _ in instance.region.inputs))
    if isinstance(solutions, Failure):
        raise RuntimeError(solutions)
    assignment = assign(instance, root_solution(solutions), trace.parameters)
    return emit(model, plan, size, trace, binding, assignment, {})

"""Runs a case in one of the real processes."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.battery.case import Call, Case
from tests.battery.cases import CASES
from tests.battery.compare import Values, after_backward, after_forward, attributes, difference, loss, written
from tests.battery.unharmed import changes, state_of
from tests.runtime.world import Member

Verdict = Literal["equal", "refused", "WRONG", "crashed", "hangs"]
SECONDS = 30
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What came of one step of a case: `compile`, or a call by its number."""

    step: str
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Ran:
    """A call as one model ran it: what it left, or what it raised and where."""

    values: Values | None
    error: Exception | None = None
    attributes: Values = field(default_factory=dict)


def awake(member: Member) -> None:
    """Has everything been imported? The call itself says so."""


def run_case(member: Member, name: str) -> list[Outcome]:
    """Run one case; the same on each rank, in a process group of its own."""
    case = CASES[name]
    outcomes: list[Outcome] = []
    if member.rank == 0 and case.cause in ("backward", "state"):
        outcomes += _compile_alone(case, member.size)
    group: Any = dist.new_group(timeout=timedelta(seconds=SECONDS))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    stock, model = case.make(), case.make()
    plan = {"version": 1, "modules": case.rules}
    try:
        torch.manual_seed(1)
        model.train(case.calls[0].train)
        stock.train(case.calls[0].train)
        tpplan.parallelize(model, plan, mesh, case.calls[0].arguments())
    except Exception as error:
        return [*outcomes, _raised("compile", error)]
    for number, call in enumerate(case.calls):
        outcome = _compare(case, call, f"call {number + 1}", model, stock)
        outcomes.append(outcome)
        if outcome.verdict == "crashed":
            break
    return outcomes


def _compile_alone(case: Case, tp: int) -> list[Outcome]:
    """Compile without processes, for what that does to the model."""
    model = case.make().train(case.calls[0].train)
    torch.manual_seed(1)
    example = case.calls[0].arguments()
    before = state_of(model)
    with contextlib.suppress(Exception):  # `parallelize` fails with the same
        tpplan.compile_plan(model, {"version": 1, "modules": case.rules}, tp, example)
    changed = changes(before, state_of(model))
    return [Outcome("compile_plan", "WRONG", f"changes the model: {', '.join(changed[:3])}")] if changed else []


def _compare(case: Case, call: Call, step: str, model: nn.Module, stock: nn.Module) -> Outcome:
    ours = _run(call, model)
    if isinstance(ours.error, tpplan.TpplanError):
        if call.before is not None:  # so that the next call is of equal models
            call.before(stock)
        return _raised(step, ours.error)
    before = attributes(stock)
    theirs = _run(call, stock)
    if ours.values is None:
        assert ours.error is not None
        return Outcome(step, "equal", "both raise") if theirs.error else _raised(step, ours.error)
    if theirs.values is None:
        return Outcome(step, "WRONG", f"the stock model raises {type(theirs.error).__name__}: {theirs.error}")
    wrote = written(theirs.attributes, before)
    kept = {name: value for name, value in ours.attributes.items() if name in wrote}
    words = difference(ours.values | kept, theirs.values | wrote, case.tolerance)
    return Outcome(step, "WRONG" if words else "equal", words)


def _run(call: Call, model: nn.Module) -> Ran:
    model.train(call.train)
    try:
        torch.manual_seed(2)
        if call.before is not None:
            call.before(model)
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(3)
        arguments = call.arguments()
        with call.under():
            result = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
            number = loss(result)
        values = after_forward(result)
        if number is not None:
            number.backward()
        return Ran(values | after_backward(model, arguments), attributes=attributes(model))
    except Exception as error:
        return Ran(None, error)


def _raised(step: str, error: Exception) -> Outcome:
    refused = isinstance(error, tpplan.TpplanError) and not isinstance(error, tpplan.InternalError)
    lines = [line for line in str(error).splitlines() if line.strip()]
    detail = lines[0] if refused and lines else f"{type(error).__name__}: {lines[0] if lines else ''}"
    if not refused:
        detail += f" ({_place(error)})"
    return Outcome(step, "refused" if refused else "crashed", detail)


def _place(error: BaseException) -> str:
    """The last line of our own source that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "tpplan" in frame.filename] or list(frames)
    if error.__cause__ is not None and isinstance(error, tpplan.InternalError):
        return _place(error.__cause__)
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else "?"

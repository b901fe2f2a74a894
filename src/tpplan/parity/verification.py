"""Verify: run the stock model and the sharded program on the same numbers, and compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tpplan.ambience import ambience
from tpplan.asked import AskedPlan, plan_of
from tpplan.compiler.ir.program import Program
from tpplan.compiler.later import placement_difference
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.request import Request
from tpplan.compiler.trace.branches import Captures
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.hf.recorded_outputs import recording_outputs
from tpplan.parity.budget import choose_dtype, refuse_too_large
from tpplan.parity.call import Call, call_with_numbers
from tpplan.parity.compare import Setting, compare
from tpplan.parity.materialise import copy_with_numbers
from tpplan.parity.parity_errors import RankError, RanksDisagreeError, UnshardedError
from tpplan.parity.parity_report import ParityReport
from tpplan.parity.processes import run_in_processes
from tpplan.parity.reference import UnshardedRun, run_reference
from tpplan.parity.rounding import moved_by_rounding
from tpplan.parity.simulate import run_simulated
from tpplan.parity.threads import TIMEOUT
from tpplan.plan import CompileError
from tpplan.plan.taken import FLAG, FUNCTION, RANKS, SECONDS, WHOLE, optional, takes
from tpplan.rehearsal.prove import prove
from tpplan.runtime.parameters.taken_apart import taken_apart
from tpplan.served import served
from tpplan.taken_models import DTYPE, INPUTS, MODEL

Inputs = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor | None
Progress = Callable[[str], None]


@ambience()
@takes(
    model=MODEL,
    tp=RANKS,
    inputs=INPUTS,
    processes=FLAG,
    dtype=DTYPE,
    seed=WHOLE,
    timeout=SECONDS,
    progress=optional(FUNCTION),
    partial=FLAG,
)
def verify(
    model: nn.Module,
    plan: AskedPlan,
    tp: int,
    inputs: Inputs = None,
    *,
    processes: bool = False,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
    partial: bool = False,
) -> ParityReport:
    """Compare a sharded model with the unsharded one: outputs, every gradient, and where they first part.

    Both run on the CPU, forward and backward, in evaluation mode, as real ranks drop their own entries, on the
    same numbers: the model's own and the inputs' own where they have any. Where the program of training doesn't serve a
    call in evaluation, the call is proved by itself and runs by its own program, as after `parallelize`.

    Args:
        model: the stock model, materialised or on `meta`; it is not changed.
        plan: a plan, what `load_plan` takes, "auto", or styles of `parallelize_module`; see `compile_plan`.
        tp: number of ranks on the plan's axis.
        inputs: an example call; see `compile_plan`. Tensors without numbers are given random ones.
        processes: run a process for each rank, with gloo, instead of a thread.
        dtype: of weights and activations. By default float64 for models whose parameters take up to 2 GiB that way,
            float32 for larger ones and for those that don't run in float64.
        seed: of everything that is made up.
        timeout: seconds after which a rank that keeps the others waiting is given up on; with `processes`, seconds for
            the whole of the sharded run.
        progress: called with a few words at the start of each stage.
        partial: whether `model` may be a part of what the plan is for; see `compile_plan`.

    Returns:
        The report; `report.ok` says whether all is well, `report.first_divergence` names a module if it isn't.

    Raises:
        PlanError: the plan has mistakes.
        CompileError: plan and model don't fit together.
        VerifyError: the verification couldn't be carried out.
        ArgumentError: an argument is of another kind.

    Example:
        >>> plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
        >>> report = tpplan.verify(model, plan, tp=4, inputs=x)
        >>> report.ok
        True
    """
    with recording_outputs(model, inputs), taken_apart(model):
        return _verified(model, plan, tp, inputs, processes, dtype, seed, timeout, progress, partial)


def _verified(
    model: nn.Module,
    plan: AskedPlan,
    tp: int,
    inputs: Inputs,
    processes: bool,
    dtype: torch.dtype | None,
    seed: int,
    timeout: float,
    progress: Progress | None,
    partial: bool,
) -> ParityReport:
    loaded, _ = plan_of(plan, model, tp, inputs)
    inner = served(model, loaded, tp, inputs, partial=partial)
    model, loaded, arguments, keywords = inner.model, inner.plan, inner.arguments, inner.keywords
    _tell(progress, f"compiling {loaded.name or 'the plan'} for {type(model).__name__} at tp={tp}")
    request = Request(model, loaded, tp, arguments, keywords, device=torch.device("cpu"))
    compiled = prove(request)

    def compared(program: Program) -> ParityReport:
        return verify_program(
            model, program, (arguments, keywords),
            processes=processes, dtype=dtype, seed=seed, timeout=timeout, progress=progress,
        )  # fmt: skip

    try:
        report = compared(compiled.program)
    except (RankError, RanksDisagreeError):
        own = _of_evaluation(request, compiled)
        if own is None:
            raise
        return compared(own)
    if report.ok:
        return report
    own = _of_evaluation(request, compiled)
    return report if own is None else compared(own)


def _of_evaluation(request: Request, compiled: Compiled) -> Program | None:
    """The program of the same call in evaluation, beside that of training; None if it is no other.

    Raises:
        CompileError: the call can't be proved in evaluation, or needs other shards.
    """
    program = compiled.program
    if not program.training:
        return None
    # What was captured is another mode's; modules that evaluation leaves out are proved.
    again = replace(request, training=False, partly=True, members=compiled.members, captures=Captures())
    own = prove(again).program
    if replace(own, training=True) == program:
        return None
    difference = placement_difference(program, own)
    if difference:
        message = f"in evaluation the model needs other reshards than in training, and {difference}"
        raise CompileError.of("TP117", message, help="shard only layers that both modes use alike")
    return own


@ambience()
def verify_program(
    model: nn.Module,
    program: Program,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    processes: bool = False,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> ParityReport:
    """As `verify`, for a program that was compiled before.

    Args:
        model: the stock model that `program` was compiled for; it is not changed.
        program: the program.
        example: positional and keyword arguments of the call to compare.
        processes: see `verify`.
        dtype: see `verify`.
        seed: see `verify`.
        timeout: see `verify`.
        progress: see `verify`.
    """
    chosen = dtype or choose_dtype(program)
    around = Surroundings(model)
    try:
        try:
            prepared = _prepare(model, program, example, chosen, seed, progress)
            if dtype is None and chosen is torch.float64 and _shows_nan(prepared[2]):
                narrow = _prepare(model, program, example, torch.float32, seed, progress)
                if not _shows_nan(narrow[2]):  # as where masks add up to -inf in the one alone
                    chosen, prepared = torch.float32, narrow
        except UnshardedError:
            if dtype is not None or chosen is not torch.float64:
                raise
            # Some operators, such as the product of grouped rows, know no float64. Quantised weights may name the dtype
            # that they are multiplied in.
            chosen, prepared = _prepare_narrow(model, program, example, seed, progress)
        whole, call, reference = prepared
        kind = "processes" if processes else "simulated"
        _tell(progress, f"running {program.size} {'processes' if processes else 'simulated ranks'}")
        run = run_in_processes if processes else run_simulated
        ranks = run(whole, program, call, reference.cotangents, timeout, reference.draws)
        rounded = functools.partial(moved_by_rounding, whole, call, reference, seed)
        return compare(program, reference, ranks, Setting(chosen, kind, seed), rounded)
    finally:
        around.restore()  # both runs are the model's own code


def _prepare_narrow(
    model: nn.Module,
    program: Program,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    seed: int,
    progress: Progress | None,
) -> tuple[torch.dtype, tuple[nn.Module, Call, UnshardedRun]]:
    """In float32, or where the model can't run in that, in a dtype of two bytes that its parameters have."""
    own = dict.fromkeys(held.dtype for held in model.parameters() if held.is_floating_point() and held.itemsize == 2)
    *others, last = torch.float32, *own
    for dtype in others:
        with suppress(UnshardedError):
            return dtype, _prepare(model, program, example, dtype, seed, progress)
    return last, _prepare(model, program, example, last, seed, progress)


def _shows_nan(reference: UnshardedRun) -> bool:
    return any(bool(output.isnan().any()) for output in reference.seen.outputs.values() if output.is_floating_point())


def _prepare(
    model: nn.Module,
    program: Program,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    dtype: torch.dtype,
    seed: int,
    progress: Progress | None,
) -> tuple[nn.Module, Call, UnshardedRun]:
    """The model and the call in `dtype`, with numbers, and what the unsharded model makes of them."""
    refuse_too_large(model, program, dtype)
    whole = copy_with_numbers(model, dtype, seed)
    call = call_with_numbers(model, *example, dtype, seed)
    _tell(progress, f"running the unsharded model in {str(dtype).removeprefix('torch.')}")
    return whole, call, run_reference(whole, call, seed)


def _tell(progress: Progress | None, stage: str) -> None:
    if progress is not None:
        progress(stage)

"""Compare the sharded run with the unsharded one: outputs, gradients, modules, collectives.

in:  the unsharded run, and what each rank shows
out: `ParityReport`
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tpplan.compat.dtensors import local_of
from tpplan.compiler.bind.computed_weights import layer_of
from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import Program
from tpplan.parity.divergence import compare_calls, first_divergence
from tpplan.parity.measure import joined, magnitude, relative_error
from tpplan.parity.parity_report import Divergence, ParityReport, TensorParity
from tpplan.parity.rank import RankResult, SimulatedDistributor
from tpplan.parity.reference import UnshardedRun
from tpplan.parity.rounding import Moved
from tpplan.parity.threads import Rendezvous, ThreadCommunicator
from tpplan.parity.tolerance import bound_of, tolerance_for

_SMALL = 1e-3


@dataclass(frozen=True, slots=True)
class Setting:
    """How a verification was carried out; see `ParityReport`."""

    dtype: torch.dtype
    ranks: str
    seed: int


def compare(
    program: Program,
    reference: UnshardedRun,
    ranks: Sequence[RankResult],
    setting: Setting,
    rounded: Callable[[], Moved],
) -> ParityReport:
    """Hold what the ranks show against the unsharded run; `rounded` tells how far rounding moves that one."""
    tolerance = tolerance_for(reference)
    outputs = (*_outputs(reference, ranks, tolerance.outputs), *_buffers(reference, ranks, tolerance.outputs))
    parameters = tuple(_gradients(program, reference, ranks, tolerance.gradients))
    inputs = tuple(_input_gradients(reference, ranks, tolerance.gradients))
    calls = compare_calls(program, reference.seen.calls, [rank.seen.calls for rank in ranks], tolerance.outputs)
    predicted, least = _counted(program.count_collectives()), _counted(program.count_collectives(picked=False))
    wrong = [*_disagreements(outputs, "output"), *_disagreements((*parameters, *inputs), "gradient of")]
    divergence, miscounts = None, tuple(_miscounts(program, reference, ranks, least, predicted))
    notes = () if wrong else miscounts
    if wrong:
        moved = _widened(program, reference, rounded(), outputs, parameters, inputs)
        notes = (MAY_BE_ROUNDING,) if all(held.ok for part in moved for held in part) else ()
        owners = {p.name: p.name.rpartition(".")[0] for p in program.parameters}
        divergence = first_divergence(calls, parameters, tolerance.outputs, owners)
        wrong = [*_located(divergence), *wrong]
    return ParityReport(
        plan=program.plan,
        model=program.model,
        size=program.size,
        dtype=str(setting.dtype).removeprefix("torch."),
        ranks=setting.ranks,
        seed=setting.seed,
        tolerance=tolerance,
        outputs=outputs,
        gradients=(*parameters, *inputs),
        divergence=divergence,
        modules_compared=sum(call.error is not None for call in calls),
        collectives=dict(ranks[0].counts),
        predicted=predicted,
        least=least,
        problems=(*_undefined(reference), *wrong, *(miscounts if wrong else ())),
        notes=notes,
        assumed=program.assumed,
    )


def _counted(of_program: Counter[str]) -> dict[str, int]:
    """Without telling sums of one step apart: those depend on the dtype, and ranks that are simulated make none."""
    sums, shots = str(Collective.ALL_REDUCE), of_program[str(Collective.ONE_SHOT)]
    return dict(of_program - Counter({str(Collective.ONE_SHOT): shots}) + Counter({sums: shots}))


def _widened(
    program: Program, reference: UnshardedRun, moved: Moved, *compared: tuple[TensorParity, ...]
) -> list[tuple[TensorParity, ...]]:
    """Outputs, gradients of parameters and of inputs, with the bounds of those in which rounding errors grow."""
    seen, least = reference.seen, _least_scale(reference)
    scales = (
        {name: magnitude(whole) for name, whole in seen.outputs.items()},
        _scales(program, seen.gradients),
        {f"inputs.{name}": max(magnitude(whole), least) for name, whole in seen.input_gradients.items()},
    )
    found = (moved.outputs, moved.gradients, {f"inputs.{name}": held for name, held in moved.input_gradients.items()})

    def bound(name: str, place: int) -> float:
        return bound_of(found[place].get(name, 0.0), scales[place].get(name, 0.0), reference.epsilon)

    return [
        tuple(replace(held, tolerance=max(held.tolerance, bound(held.name, place))) for held in part)
        for place, part in enumerate(compared)
    ]


def _least_scale(reference: UnshardedRun) -> float:
    """The smallest scale of an input's gradient."""
    seen = reference.seen
    return _SMALL * max(map(magnitude, (*seen.gradients.values(), *seen.input_gradients.values())), default=0.0)


def _outputs(reference: UnshardedRun, ranks: Sequence[RankResult], tolerance: float) -> Iterable[TensorParity]:
    for name, whole in reference.seen.outputs.items():
        parts = [rank.seen.outputs[name] for rank in ranks if name in rank.seen.outputs]
        yield TensorParity(name, _output_error(whole, parts, len(ranks)), tolerance)


def _buffers(reference: UnshardedRun, ranks: Sequence[RankResult], tolerance: float) -> Iterable[TensorParity]:
    """Buffers that a forward writes to are results as well: whole, and alike on every rank."""
    for name in dict.fromkeys((*reference.seen.buffers, *(name for rank in ranks for name in rank.seen.buffers))):
        whole = reference.seen.buffers.get(name)
        parts = [rank.seen.buffers.get(name) for rank in ranks]
        errors = [math.inf if whole is None or part is None else relative_error(whole, part) for part in parts]
        yield TensorParity(f"buffers.{name}", max(errors), tolerance)


def _output_error(whole: Tensor, parts: Sequence[Tensor], size: int) -> float:
    """A result is replicated, so that every rank holds the whole, or pinned to shards in rank order."""
    if len(parts) < size:
        return float("inf")
    if all(part.shape != whole.shape for part in parts):
        candidate = next(joined(parts, tuple(whole.shape)), None)
        if candidate is not None:
            return relative_error(whole, candidate)
    return max(relative_error(whole, part) for part in parts)


def _gradients(
    program: Program, reference: UnshardedRun, ranks: Sequence[RankResult], tolerance: float
) -> Iterable[TensorParity]:
    """Compare each rank's gradient with its part of the whole one, cut as the parameter was."""
    distributors = [SimulatedDistributor(ThreadCommunicator(Rendezvous(len(ranks)), r)) for r in range(len(ranks))]
    scales = _scales(program, reference.seen.gradients)
    for placement in program.parameters:
        whole = reference.seen.gradients.get(placement.name)
        found = [rank.seen.gradients.get(placement.name) for rank in ranks]
        if whole is None:
            if any(gradient is not None and magnitude(gradient) > 0 for gradient in found):
                yield TensorParity(placement.name, float("inf"), tolerance)
            continue
        errors: list[float] = []
        for distributor, gradient in zip(distributors, found, strict=True):
            expected = local_of(distributor.distribute(whole, placement))
            given = torch.zeros_like(expected) if gradient is None else gradient
            errors.append(relative_error(expected, given, scales[placement.name]))
        yield TensorParity(placement.name, max(errors), tolerance)


def _scales(program: Program, gradients: dict[str, Tensor]) -> dict[str, float]:
    """What each gradient's error is relative to; see `tpplan.parity.tolerance`."""
    own = {name: magnitude(gradient) for name, gradient in gradients.items()}
    least = _SMALL * max(own.values(), default=0.0)
    siblings: dict[str, float] = {}
    for name, held in own.items():
        owner = _owner(name)
        siblings[owner] = max(siblings.get(owner, least), held)
    return {name: siblings[_owner(name)] for name in own}


def _owner(name: str) -> str:
    """The module whose parameter it is, or whose weight is computed of it."""
    return layer_of(name) or name.rpartition(".")[0]


def _input_gradients(reference: UnshardedRun, ranks: Sequence[RankResult], tolerance: float) -> Iterable[TensorParity]:
    seen = reference.seen
    least = _least_scale(reference)
    for name, whole in seen.input_gradients.items():
        parts = [rank.seen.input_gradients.get(name) for rank in ranks]
        scale = max(magnitude(whole), least)
        present = [torch.zeros_like(whole) if part is None else part for part in parts]
        arrived = all(part.shape != whole.shape for part in present)
        together = next(joined(present, tuple(whole.shape)), None) if arrived else None
        found = present if together is None else [together]
        errors = [relative_error(whole, part, scale) for part in found]
        yield TensorParity(f"inputs.{name}", max(errors), tolerance)


MAY_BE_ROUNDING = (
    "roundings of the unsharded model move these by as much: large numbers cancel in it, and the plan may be right"
)
NOTHING_BUT_ZEROS = (
    "the unsharded model itself gives nothing but zeros, where nothing can be compared; pass other numbers"
)


def _undefined(reference: UnshardedRun) -> Iterable[str]:
    """Results of the unsharded model that are no numbers, or nothing but zeros: any program would seem to agree."""
    seen = reference.seen
    found = [name for name, held in (*seen.outputs.items(), *seen.gradients.items()) if bool(held.isnan().any())]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"the unsharded model itself gives NaN for `{found[0]}`{more}, where nothing can be compared"
    results = [held for held in seen.outputs.values() if held.is_floating_point()]
    if results and not any(bool(held.any()) for held in (*results, *seen.gradients.values())):
        yield NOTHING_BUT_ZEROS


def _disagreements(compared: Sequence[TensorParity], what: str) -> Iterable[str]:
    wrong = sorted((held for held in compared if not held.ok), key=lambda held: -held.error)
    for held in wrong[:3]:
        yield f"{what} `{held.name}` is off by {held.error:.1e}; {held.tolerance:.1e} would be rounding"
    if len(wrong) > 3:
        yield f"and {len(wrong) - 3} more of {len(compared)}"


def _located(divergence: Divergence | None) -> Iterable[str]:
    if divergence is not None:
        where = f"`{divergence.module}`" if divergence.module else "the model itself"
        yield f"the first divergence is in the {divergence.what} of {where}: {divergence.error:.1e}"


def _miscounts(
    program: Program,
    reference: UnshardedRun,
    ranks: Sequence[RankResult],
    least: dict[str, int],
    predicted: dict[str, int],
) -> Iterable[str]:
    """Collectives that ran more or less often than predicted, and why."""
    called = {call.name for call in reference.seen.calls}
    uncalled = [m.name for m in program.modules if (m.entries or m.exits) and m.name not in called]
    if program.takes_gradients:
        return  # how often a backward runs within the forward, and how far it goes, isn't predicted
    for number, rank in enumerate(ranks):
        names = {*rank.counts, *predicted}
        if any(not least.get(n, 0) <= rank.counts.get(n, 0) <= predicted.get(n, 0) for n in names):
            counted = _listed(dict(rank.counts))
            yield f"rank {number} ran {counted}; the program says {_listed(predicted)}{_why_miscounted(uncalled)}"
            return


def _why_miscounted(uncalled: Sequence[str]) -> str:
    """What this run left out that the program was compiled with."""
    if not uncalled:
        return ""
    more = f" and {len(uncalled) - 1} more" if len(uncalled) > 1 else ""
    return f", but this call didn't run `{uncalled[0]}`{more}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no collectives"

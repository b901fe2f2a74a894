"""Calls of a sharded model on simulated ranks, each compared with the stock model's: results and all gradients."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from tpplan.calls.guard import CallGuard
from tpplan.compat.dtensors import local_of
from tpplan.compiler.cover import Cover, Subject
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import Rendezvous, ThreadCommunicator, run_ranks
from tpplan.plan import Plan, TpplanError, load_plan
from tpplan.runtime.lower import lower

Call = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[nn.Module], object]


def plan_of(rules: dict[str, Any] | str) -> Plan:
    return load_plan(rules if isinstance(rules, str) else {"version": 1, "modules": rules})


class _Turns:
    """Lets ranks that are threads, and share globals, prove one after the other, while no forward runs."""

    def __init__(self, ranks: int) -> None:
        self._meeting = threading.Barrier(ranks)
        self._turn = threading.Lock()
        self._taken: int | None = None  # by which thread
        self._changed = threading.Condition()
        self._proving, self._rounds = 0, 0
        self.covers: dict[int, tuple[Trace, Cover | None]] = {}  # of proofs, by the ids of their traces

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._taken == threading.get_ident():
            yield
            return
        with self._changed:
            self._proving += 1
        with suppress(threading.BrokenBarrierError):  # of a rank that proves alone, as what both hold has changed
            self._meeting.wait(5)
        try:
            with self._turn:
                self._taken = threading.get_ident()
                try:
                    yield
                finally:
                    self._taken = None
        finally:
            self._leave()

    def _leave(self) -> None:
        """Wait until all that prove have done so, however long it takes: a forward fills what a proof would find."""
        with self._changed:
            self._proving -= 1
            if not self._proving:
                self._rounds += 1
                self._changed.notify_all()
            this_round = self._rounds
            self._changed.wait_for(lambda: not self._proving or self._rounds != this_round)


class _Guard(CallGuard):
    """A guard of a rank that is a thread."""

    turns: _Turns

    def _compiled(self, compile_it: Callable[[], Compiled]) -> Compiled:
        with self.turns():
            return super()._compiled(compile_it)

    def _cover(self, subject: Subject) -> Cover | None:
        """One for all ranks, of a proof that they share, and of a call that has no parts of their own."""
        given, known = subject.given, self.turns.covers
        with self.turns():
            if given.parts:
                return super()._cover(subject)
            if id(given.trace) not in known:
                known[id(given.trace)] = given.trace, super()._cover(subject)
            return known[id(given.trace)][1]


def on_ranks(
    stock: nn.Module, rules: dict[str, Any] | str, tp: int, example: Call, work: Callable[[nn.Module, CallGuard], Any]
) -> list[Any]:
    """`work` on each rank's sharded copy of `stock`, with its guard."""
    plan = plan_of(rules)
    return _on_ranks(stock, plan, compile_call(Request(stock, plan, tp, *example)), example, work)


def _on_ranks(
    stock: nn.Module, plan: Plan, compiled: Compiled, example: Call, work: Callable[[nn.Module, CallGuard], Any]
) -> list[Any]:
    tp = compiled.program.size
    turns = _Turns(tp)

    def one(axis: ThreadCommunicator) -> Any:
        guard = _Guard(make_skeleton(stock).model, plan, compiled, *example, rank=axis.rank)
        guard.turns = turns
        own = lower(copy_structure(stock), compiled.program, SimulatedDistributor(axis), guard)
        return work(own, guard)

    return run_ranks(tp, one)


def first_tensor(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return next(held for held in (result.values() if isinstance(result, dict) else result) if isinstance(held, Tensor))


def stepped(model: nn.Module, call: Call) -> tuple[Tensor, dict[str, Tensor]]:
    """The result of a call; the gradients of its parameters, and of tensors among its arguments that want one."""
    arguments, keywords = copy.deepcopy(call)
    for parameter in model.parameters():
        parameter.grad = None
    output = first_tensor(model(*arguments, **keywords))
    found: dict[str, Tensor] = {}
    if output.requires_grad:
        output.square().sum().backward()
        found = {n: local_of(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        named = {**{f"*{i}": held for i, held in enumerate(arguments)}, **keywords}
        found |= {n: t.grad for n, t in named.items() if isinstance(t, Tensor) and t.grad is not None}
    return output.detach(), found


def walked(model: nn.Module, calls: Sequence[Call | Change]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What each call shows; changes are made in between."""
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for call in calls:
        if isinstance(call, tuple):
            found.append(stepped(model, call))
        else:
            call(model)
    return found


def worst(
    stock: nn.Module,
    rules: dict[str, Any] | str,
    tp: int,
    example: Call,
    calls: Sequence[Call | Change],
    proofs: list[int] | None = None,
) -> list[float]:
    """For each of `calls` the largest error on any rank, relative to the largest number of its kind.

    A function among the calls is applied to the sharded and to the stock model.
    """
    plan = plan_of(rules)
    compiled = compile_call(Request(stock, plan, tp, *example))

    def work(own: nn.Module, guard: CallGuard) -> list[tuple[Tensor, dict[str, Tensor]]]:
        found = walked(own, calls)
        if proofs is not None:
            proofs.append(len(list(guard._proofs)))
        return found

    ranks = _on_ranks(stock, plan, compiled, example, work)
    return _worst(compiled.program, ranks, walked(copy.deepcopy(stock), calls), tp)


def verdicts(
    stock: nn.Module, rules: dict[str, Any] | str, tp: int, example: Call, calls: Sequence[Call]
) -> list[float | str]:
    """As `worst`, of calls that may be refused: what a refusal says is in the place of the error of that call."""
    plan = plan_of(rules)
    compiled = compile_call(Request(stock, plan, tp, *example))

    def work(own: nn.Module, _: CallGuard) -> list[Any]:
        found: list[Any] = []
        for call in calls:
            try:
                found.append(stepped(own, call))
            except TpplanError as error:
                found.append(str(error))
        return found

    ranks = _on_ranks(stock, plan, compiled, example, work)
    refused = [isinstance(seen, str) for seen in ranks[0]]
    assert all([isinstance(seen, str) for seen in found] == refused for found in ranks), "all ranks refuse the same"
    model = copy.deepcopy(stock)
    return [
        ranks[0][number]
        if refused[number]
        else _worst(compiled.program, [[found[number]] for found in ranks], [stepped(model, call)], tp)[0]
        for number, call in enumerate(calls)
    ]


def _worst(
    program: Program, ranks: Sequence[Sequence[Any]], expected: Sequence[tuple[Tensor, dict[str, Tensor]]], tp: int
) -> list[float]:
    distributors = [SimulatedDistributor(ThreadCommunicator(Rendezvous(tp), rank)) for rank in range(tp)]
    return [
        max(_errors(program, distributors[rank], ranks[rank][number], *whole) for rank in range(tp))
        for number, whole in enumerate(expected)
    ]


def _errors(
    program: Program, distributor: SimulatedDistributor, seen: Any, output: Tensor, gradients: dict[str, Tensor]
) -> float:
    ours, own = seen
    assert own.keys() == gradients.keys()
    errors = [float((ours - output).abs().max() / output.abs().max())]
    scale = max((float(g.abs().max()) for g in gradients.values()), default=1.0)
    placed = {p.name: p for p in program.parameters}
    for name, gradient in gradients.items():
        part = local_of(distributor.distribute(gradient, placed[name])) if name in placed else gradient
        errors.append(float((own[name] - part).abs().max()) / scale)
    return max(errors)


def watched(own: nn.Module, guard: CallGuard, call: Callable[[], Tensor], times: int = 3) -> list[bool]:
    """Whether each of several equal calls has to be watched, which are then made."""
    found: list[bool] = []
    for _ in range(times):
        found.append(guard(True, (call(),), {})[1] is not None)
        own(call())
    return found


__all__ = ["on_ranks", "verdicts", "watched", "worst"]

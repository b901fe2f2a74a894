"""Calls that read the last entries of a split sequence alone: ranks exchange no more than these."""

from __future__ import annotations

import copy
import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import tpplan
from tests.compiler.toys import HIDDEN, Mlp
from tests.marking import in_turns
from tests.plans.parity import PLANS, counted
from tests.runtime.simulated import Call, on_ranks, plan_of, worst
from tests.runtime.test_caches import tiny, tokens
from tests.runtime.world import Member, world
from tpplan.calls.guard import CallGuard
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.cost.communication import bytes_sent
from tpplan.cost.traffic import module_traffic, reshard_traffic
from tpplan.runtime.modules.module_runtime import RUNTIME

TOLERANCE = 1e-12
PLAN = {"body.up": "colwise", "body.down": "rowwise", "norm": "sequence", "head": "colwise"}


def seeded(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def x(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(length))


class Last(nn.Module):
    """A head for the last entries."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = Mlp(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24)

    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        return self.head(self.norm(self.body(x))[:, -last:])


class Viewed(Last):
    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        h = self.norm(self.body(x))
        return self.head(h.view(*h.shape).clone().float()[:, -last:, :].double())


class Returned(Last):
    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        return self.norm(self.body(x))[:, -last:]


def plan_for(kind: type[nn.Module]) -> dict[str, Any]:
    return {name: style for name, style in PLAN.items() if name != "head" or kind is not Returned}


class Twice(Last):
    """Reads different numbers of entries from one value."""

    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        h = self.norm(self.body(x))
        return self.head(h[:, -last:]).sum(1) + self.head(h[:, -last - 1 :]).sum(1)


class AlsoWhole(Last):
    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        h = self.norm(self.body(x))
        return self.head(h[:, -last:]) + self.head(h).sum(1, keepdim=True)


class ButTheLast(Last):
    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        return self.head(self.norm(self.body(x))[:, -last - 1 : -1])


class Scaled(Last):
    """Does more than to cut before the head."""

    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        return self.head(self.norm(self.body(x))[:, -last:] * 2)


class ByBatch(Last):
    """How many entries it reads follows from a size."""

    def forward(self, x: Tensor, last: int = 1) -> Tensor:
        return self.head(self.norm(self.body(x))[:, -x.shape[0] :])


class Leaving(Last):
    """Leaves what it cuts with its caller as well."""

    def forward(self, x: Tensor, last: int = 1, seen: Any = None) -> Tensor:
        h = self.norm(self.body(x))
        if seen is not None:
            seen.append(h)
        return self.head(h[:, -last:])


def program_of(kind: type[nn.Module], call: Call, tp: int = 2) -> Program:
    return compile_call(Request(seeded(kind), plan_of(plan_for(kind)), tp, *call)).program


def tails(program: Program) -> list[int]:
    return [reshard.target.tail for _, reshard in program.reshards() if reshard.target.tail]


KINDS = [Last, Viewed, Returned, Twice, AlsoWhole, ButTheLast, Scaled]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp"), in_turns(KINDS, [2, 4], quick=1))
def test_results_and_gradients_for_prompts_of_all_lengths(kind: type[nn.Module], tp: int) -> None:
    """Of fewer entries on a rank than are read, of fewer in all, and of lengths that the ranks can't share."""
    calls = [((x(3, length),), {"last": last}) for last in (1, 3, 5) for length in (16, 4, 8, 5, 24)]
    tolerance = 1e-6 if kind is Viewed else TOLERANCE
    assert max(worst(seeded(kind), plan_for(kind), tp, calls[0], calls)) < tolerance


@pytest.mark.parametrize(
    ("kind", "read"),
    [(Last, [3]), (Viewed, [3]), (Returned, [3]), (Twice, [4]), (AlsoWhole, []), (ButTheLast, [])],
)
def test_a_tail_is_exchanged_where_no_more_is_read(kind: type[nn.Module], read: list[int]) -> None:
    program = program_of(kind, ((x(3, 16),), {"last": 3}))
    assert tails(program) == read
    assert Program.from_dict(program.to_dict()).digest == program.digest
    for module, reshard in program.reshards():
        if reshard.target.tail:
            traffic = reshard_traffic(reshard, 2).forward
            assert traffic.counts == {"all-reduce": 1} and traffic.sent == {"all-reduce": 3 * read[0] * HIDDEN * 8}
            assert module.name == "norm"


def test_a_body_that_works_on_what_it_cuts_has_the_whole() -> None:
    assert tails(program_of(Scaled, ((x(3, 16),), {"last": 3}))) == []


def test_how_many_are_read_is_looked_at_in_each_call() -> None:
    """A batch of three reads three entries, where the proof has the last two."""
    stock = seeded(ByBatch)

    def work(own: nn.Module, _: CallGuard) -> None:
        for batch, length in ((1, 16), (3, 16), (2, 4)):
            assert torch.allclose(own(x(batch, length)), stock(x(batch, length)))

    on_ranks(stock, PLAN, 2, ((x(2, 16),), {}), work)


def test_what_is_not_there_cannot_be_observed() -> None:
    def work(own: nn.Module, _: CallGuard) -> None:
        tpplan.observe(own.get_submodule("norm"), lambda *_: None)
        with pytest.raises(tpplan.TpplanError, match=r"TP178 .*called for its last tokens alone"):
            own(x(2, 16))

    on_ranks(seeded(Last), PLAN, 2, ((x(2, 16),), {}), work)


_WHOLE = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
}


class Sent(TorchDispatchMode):
    """Counts the bytes that collectives of two ranks send."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = _WHOLE.get(func.overloadpacket.__name__) if func.namespace == "c10d" else None
        if found is not None:
            kind, place = found
            held = args[place]
            self.bytes[kind] += bytes_sent(kind, (held if isinstance(held, Tensor) else held[0]).nbytes, 2)
        return func(*args, **(kwargs or {}))


def _prompts(member: Member, family: str) -> None:
    stock, example = tiny(family)
    own: Any = tpplan.parallelize(
        copy.deepcopy(stock), PLANS / f"{family}-sequence.yaml", member.mesh(), example
    ).eval()
    for batch, length in ((2, 8), (3, 16), (1, 2)):
        ids = tokens(batch, length)
        call: dict[str, Any] = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
        with torch.no_grad():
            own(**call)
            with CommDebugMode() as counts, Sent() as sent:
                logits = own(**call).logits
            assert torch.allclose(logits, stock(**call).logits)
        program: Program = own.__dict__[RUNTIME].guard._current
        assert tails(program) == [1]
        traffic = module_traffic(program.modules, 2).forward
        assert counted(counts) == traffic.counts == program.count_collectives(backward=False)
        if (batch, length) == (2, 8):
            assert sent.bytes == traffic.sent
        assert sent.bytes["all-reduce"] == traffic.sent["all-reduce"] // 2 * batch


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_prompt_of_generate_exchanges_its_last_token(family: str) -> None:
    world(2).run(_prompts, family)


def test_what_is_left_with_the_caller_is_whole() -> None:
    stock, expected = seeded(Leaving), list[Tensor]()
    stock(x(2, 16), 1, expected)

    def work(own: nn.Module, _: CallGuard) -> list[Tensor]:
        found: list[Tensor] = []
        own(x(2, 16), 1, found)
        return found

    for (seen,) in on_ranks(stock, PLAN, 2, ((x(2, 16), 1, []), {}), work):
        assert torch.allclose(seen, expected[0])


def _watched(member: Member, compiled: bool) -> None:
    torch.manual_seed(0)
    stock = Last().double()
    with mock.patch.dict(os.environ, {} if compiled else {"TPPLAN_DEBUG": "1"}):
        own: Any = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": PLAN}, member.mesh(), (x(2, 16),))
    call = torch.compile(own, backend="eager") if compiled else own
    for length in (16, 8, 2):
        with torch.no_grad():
            assert torch.allclose(call(x(2, length)), stock(x(2, length)))
    loss = call(x(2, 16)).square().sum()
    loss.backward()
    stock(x(2, 16)).square().sum().backward()
    for ours, theirs in zip(own.parameters(), stock.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tail_under_debug_and_compiled(compiled: bool) -> None:
    world(2).run(_watched, compiled)

"""Sizes that the axis doesn't divide: the same outputs and gradients, and the traffic that the program tells."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.models.tiny import first_output
from tests.models.uneven import SUBJECTS, Subject, uneven_subject
from tests.runtime.world import Member, world
from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.cost.communication import bytes_sent
from tpplan.cost.traffic import gradient_sum_traffic, module_traffic
from tpplan.parity import verify_program
from tpplan.parity.parity_errors import VerifyError
from tpplan.parity.threads import ThreadCommunicator
from tpplan.plan import load_plan
from tpplan.runtime.bodies import bodies
from tpplan.runtime.ranks import reshard
from tpplan.runtime.ranks.segments import in_packs

COARSE = ("llama", "tied llama", "phi3")  # their RMSNorm computes in float32


@functools.cache
def compiled(name: str, tp: int) -> tuple[Subject, Program]:
    model, plan, call = uneven_subject(name)
    return (model, plan, call), compile_call(Request(model, load_plan(plan), tp, *call)).program


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("tp", [2, 4])
def test_uneven_parts_compute_the_same(name: str, tp: int) -> None:
    (model, _, call), program = compiled(name, tp)
    assert program.is_uneven or tp == 2
    assert not program.diagnostics
    report = verify_program(model, program, call)
    assert report.ok, str(report)
    assert report.max_error < (1e-5 if name in COARSE else 1e-13)
    assert report.collectives == report.predicted
    assert {g.name for g in report.gradients if not g.name.startswith("inputs.")} == {
        n for n, _ in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["packed, split by an attribute", "tied vocabulary", "gpt2"])
@pytest.mark.parametrize("tp", [2, 4])
def test_programs_survive_json(name: str, tp: int) -> None:
    _, program = compiled(name, tp)
    again = Program.from_dict(program.to_dict())
    assert again == program and again.digest == program.digest


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow if name in ("packed, split by an attribute", "vocabulary") else pytest.mark.sweep,
        )
        for name in ("mlp", "packed, split by an attribute", "vocabulary", "tied vocabulary", "gpt2")
    ],
)
def test_processes_compute_the_same(name: str) -> None:
    (model, _, call), program = compiled(name, 2)
    report = verify_program(model, program, call, processes=True)
    assert report.ok, str(report)
    assert report.collectives == report.predicted


@pytest.mark.slow
@pytest.mark.processes
def test_four_processes_of_which_one_holds_nothing_compute_the_same() -> None:
    (model, _, call), program = compiled("vocabulary that leaves a rank without rows", 4)
    assert verify_program(model, program, call, processes=True).ok


def trained(member: Member, name: str) -> list[float]:
    """The largest difference of each parameter from the stock model's after steps with clipped gradients."""
    stock, plan, call = uneven_subject(name)
    sharded = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), call[0] or call[1])
    for model in (stock, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            first_output(model(*call[0], **call[1])).square().sum().backward()
            # A rank that holds nothing of a parameter must take part in its collectives all the same.
            assert all(parameter.grad is not None for parameter in model.parameters())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    whole = {key: held.full_tensor() for key, held in sharded.state_dict().items()}  # pyright: ignore
    return [float((whole[key] - held).abs().max()) for key, held in stock.state_dict().items()]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("packed, split by an attribute", 2),
        ("packed, that torch.chunk would leave a rank of without features", 4),
        ("untied vocabulary that leaves a rank without rows", 4),
        ("gpt2", 2),
    ],
)
def test_training_ends_at_the_same_weights(name: str, tp: int) -> None:
    for errors in world(tp).run(trained, name):
        assert max(errors) < 1e-10


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["tied vocabulary", "vocabulary", "gpt2", "phi3"])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_bytes_that_ranks_send_are_those_foretold(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, _, call), program = compiled(name, tp)
    sent: Counter[str] = Counter()
    exchange = ThreadCommunicator._exchange

    def metered(self: ThreadCommunicator, collective: Collective, tensor: Tensor, how: str = "") -> tuple[Tensor, ...]:
        whole = tensor.nbytes * (tp if collective is Collective.ALL_GATHER else 1)
        if self.rank == tp - 1:
            sent[str(collective)] += bytes_sent(str(collective), whole, tp)
        return exchange(self, collective, tensor, how)

    monkeypatch.setattr(ThreadCommunicator, "_exchange", metered)
    assert verify_program(model, program, call).ok
    step = module_traffic(program.modules, tp)
    foretold = step.forward + step.backward + gradient_sum_traffic(program)
    assert sent == Counter(foretold.sent)


# -- planted bugs -----------------------------------------------------------------------------------------------------
def verified(name: str, tp: int) -> Any:
    (model, _, call), program = compiled(name, tp)
    return verify_program(model, program, call)


@pytest.mark.parametrize("name", ["vocabulary", "tied vocabulary"])
def test_a_table_that_starts_as_if_all_had_as_many_rows_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(spec: Any, placements: Any, axis: Any) -> tuple[int, int]:
        if spec.style != "vocab":
            return 0, 0
        placed = placements[spec.reads[0]]
        return axis.rank * placed.stored_shape(axis.size, axis.rank)[0], placed.shape[0]

    monkeypatch.setattr(bodies, "_table", table)
    report = verified(name, 4)
    assert not report.ok
    assert report.first_divergence == "table"


def test_padding_that_stays_in_a_gathered_tensor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard, "in_packs", lambda tensor, dim, packs, size: tensor)
    report = verified("vocabulary", 4)
    assert not report.ok
    assert report.first_divergence == "head"


def test_padding_that_is_cut_in_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_the_front(tensor: Tensor, dim: int, packs: Any, size: int) -> Tensor:
        count = in_packs(tensor, dim, packs, size).shape[dim]
        return tensor.narrow(dim, tensor.shape[dim] - count, count)

    monkeypatch.setattr(reshard, "in_packs", from_the_front)
    report = verified("vocabulary", 4)
    assert not report.ok
    assert report.first_divergence == "head"


def test_a_count_that_is_the_first_ranks_everywhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.compiler.ir.program import LocalAttribute

    compiled("packed, split by an attribute", 2)  # with the right counts
    monkeypatch.setattr(LocalAttribute, "on", lambda self, rank: self.local)
    with pytest.raises(VerifyError, match="rank 1"):
        verified("packed, split by an attribute", 2)


class LastRankTurns(nn.Module):
    """Only a rank with less than the first takes the other branch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 107), nn.Linear(107, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.relu() if h.shape[-1] > 53 else h.sigmoid())


def test_a_check_of_the_first_rank_alone_would_miss_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpplan.compiler.check import local_run

    plan = load_plan({"version": 1, "modules": {"up": "colwise", "down": "rowwise"}})
    model, call = LastRankTurns(), ((torch.randn(3, 12, 16),), {})
    right = compile_call(Request(model, plan, 2, *call)).program
    assert right.diagnostics[0].code == "TP104"  # gathered before the branch
    assert verify_program(model, right, call).ok
    monkeypatch.setattr(local_run, "different_ranks", lambda given: [0])
    wrong = compile_call(Request(model, plan, 2, *call)).program
    assert not verify_program(model, wrong, call).ok


class Rows(nn.Linear):
    """A layer that views its input as rows, as those of GPT-2 do."""

    def forward(self, input: Tensor) -> Tensor:
        made = torch.addmm(self.bias, input.view(-1, input.size(-1)), self.weight.t())
        return made.view(*input.shape[:-1], made.size(-1))


class Viewed(nn.Module):
    """A body that writes to what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), Rows(12, 20), Rows(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).mul_(2))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    "rules",
    [
        {"up": {"style": "colwise", "output": "replicate"}},
        {"norm": "sequence"},
    ],
)
def test_what_is_gathered_can_be_written_to(rules: dict[str, Any], tp: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    report = tpplan.verify(Viewed().double(), {"version": 1, "modules": rules}, tp, (x,))
    assert report.ok, str(report)

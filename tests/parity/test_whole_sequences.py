"""Calls whose sequence the ranks can't share evenly run by a second program, with equal results."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.marking import in_thirds, slow_but, sweep_but
from tests.models.tiny import example_keywords, first_output, tiny_model
from tests.plans.parity import run
from tests.runtime.world import Member, world
from tpplan.calls.guard import CallGuard
from tpplan.compat.dtensors import local_of
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import Rendezvous, ThreadCommunicator, run_ranks
from tpplan.plan import Plan, load_plan
from tpplan.runtime.lower import Variants, lower
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator

NAMES = ("torch_transformer", "llama", "opt", "gpt2")
LENGTHS = (12, 1, 13, 12, 7)


@dataclass(frozen=True)
class Seen:
    """What one call shows on a rank."""

    output: Tensor
    gradients: dict[str, Tensor]
    counts: Counter[str]


@functools.cache
def compiled(name: str, tp: int) -> tuple[nn.Module, Plan, Compiled, dict[str, Any]]:
    model, keywords = tiny_model(name)
    plan = load_plan(f"plans/{name}-sequence.yaml")
    return model, plan, compile_call(Request(model, plan, tp, (), keywords)), keywords


def stepped(model: nn.Module, keywords: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of a call, and every parameter's gradient."""
    output = first_output(model(**keywords))
    for parameter in model.parameters():
        parameter.grad = None
    output.square().sum().backward()
    gradients = {n: local_of(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


def simulated(name: str, tp: int) -> list[list[Seen]]:
    """A call of each length, one after the other, on every rank."""
    model, plan, proved, keywords = compiled(name, tp)
    program = proved.program

    def work(axis: ThreadCommunicator) -> list[Seen]:
        guard = CallGuard(
            make_skeleton(model).model, plan, Compiled(program, {}, (), results=proved.results), (), keywords
        )
        own = lower(copy_structure(model), program, SimulatedDistributor(axis), guard)
        found: list[Seen] = []
        for length in LENGTHS:
            axis.counts.clear()
            found.append(Seen(*stepped(own, example_keywords(name, sequence=length)), Counter(axis.counts)))
        return found

    return run_ranks(tp, work)


def worst(name: str, tp: int, ranks: list[list[Seen]]) -> float:
    """The largest error, relative to the largest number of its kind."""
    model, _, proved, _ = compiled(name, tp)
    program = proved.program
    distributors = [SimulatedDistributor(ThreadCommunicator(Rendezvous(tp), rank)) for rank in range(tp)]
    errors: list[float] = []
    for number, length in enumerate(LENGTHS):
        output, gradients = stepped(copy.deepcopy(model), example_keywords(name, sequence=length))
        scale = float(max(g.abs().max() for g in gradients.values()))
        for rank, seen in enumerate(held[number] for held in ranks):
            errors.append(float((seen.output - output).abs().max() / output.abs().max()))
            assert seen.gradients.keys() == gradients.keys()
            for placement in program.parameters:
                part = local_of(distributors[rank].distribute(gradients[placement.name], placement))
                errors.append(float((seen.gradients[placement.name] - part).abs().max()) / scale)
    return max(errors)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "tp"), in_thirds([], [("llama", 2)], [(name, tp) for name in NAMES for tp in (2, 4)]))
def test_calls_of_any_length_compute_the_same(name: str, tp: int) -> None:
    _, plan, proved, keywords = compiled(name, tp)
    program = proved.program
    model = compiled(name, tp)[0]
    whole = compile_call(Request(model, plan.with_whole_sequences(), tp, (), keywords)).program
    ranks = simulated(name, tp)
    assert worst(name, tp, ranks) < 1e-12
    for length, seen in zip(LENGTHS, ranks[tp - 1], strict=True):
        assert seen.counts == (whole if length % tp else program).count_collectives(), length


def test_a_step_that_stays_from_the_other_program_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the exchange of the modules' reshards an odd sequence finds those of the even one."""
    monkeypatch.setattr(Variants, "_change_to", lambda self, program: None)
    with pytest.raises(tpplan.TpplanError, match="TP118"):
        simulated("torch_transformer", 2)


def test_a_sum_of_gradients_that_stays_from_the_other_program_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are summed in sequence regions only."""
    change = Variants._change_to

    def keeping_sums(self: Any, program: Program) -> None:
        before = self._modules[""].__dict__["_tpplan"].opened
        reads = {n: m.__dict__["_tpplan"].reads for n, m in self._modules.items() if "_tpplan" in m.__dict__}
        change(self, program)
        self._modules[""].__dict__["_tpplan"].opened = before
        for name, held in reads.items():
            self._modules[name].__dict__["_tpplan"].reads = held

    monkeypatch.setattr(Variants, "_change_to", keeping_sums)
    assert worst("torch_transformer", 2, simulated("torch_transformer", 2)) > 1e-3


# -- real processes ---------------------------------------------------------------------------------------------------
def lengths_on_processes(member: Member, name: str) -> list[tuple[float, dict[str, int]]]:
    stock, keywords = tiny_model(name)
    sharded = tpplan.parallelize(copy.deepcopy(stock), f"plans/{name}-sequence.yaml", member.mesh(), keywords)
    found: list[tuple[float, dict[str, int]]] = []
    sharded(**example_keywords(name, sequence=1))  # compiles: that mustn't be counted
    for length in LENGTHS:
        call = example_keywords(name, sequence=length)
        sharded(**call)  # the first of a size is watched, and may be run again: nor must that
        for model in (stock, sharded):
            model.zero_grad()
        ours, theirs = run(sharded, call), run(stock, call)
        scale = max(float(g.abs().max()) for g in theirs.gradients.values() if g is not None)
        errors = [float((a - b).abs().max()) for a, b in zip(ours.outputs, theirs.outputs, strict=True)]
        for key, gradient in theirs.gradients.items():
            mine = ours.gradients[key]
            assert gradient is not None and mine is not None
            errors.append(float((mine - gradient).abs().max()) / scale)
        found.append((max(errors), dict(ours.forward + ours.backward)))
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", sweep_but(["torch_transformer"], ["torch_transformer", "llama"]))
def test_processes_compute_the_same_at_any_length(name: str) -> None:
    model, plan, proved, keywords = compiled(name, 2)
    program = proved.program
    whole = compile_call(Request(model, plan.with_whole_sequences(), 2, (), keywords)).program
    for found in world(2).run(lengths_on_processes, name):
        for length, (error, counts) in zip(LENGTHS, found, strict=True):
            assert error < 1e-12
            assert Counter(counts) == (whole if length % 2 else program).count_collectives()


def generated(member: Member, length: int) -> tuple[list[list[int]], list[list[int]], int]:
    """The tokens, those of the stock model, and how often a part of the sequence was handed out."""
    stock, keywords = tiny_model("llama")
    stock.eval()
    sharded = tpplan.parallelize(copy.deepcopy(stock), "plans/llama-sequence.yaml", member.mesh(), keywords)
    prompt: dict[str, Any] = example_keywords("llama", sequence=length)
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    prompt["attention_mask"][0, :3] = 0  # padding in front, so that positions count from behind it
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with mock.patch.object(
        ProcessGroupCommunicator, "reduce_scatter", autospec=True, side_effect=ProcessGroupCommunicator.reduce_scatter
    ) as scattered:
        ours = sharded.generate(**prompt, **settings)  # pyright: ignore
    return ours.tolist(), stock.generate(**prompt, **settings).tolist(), scattered.call_count  # pyright: ignore


@pytest.mark.processes
@pytest.mark.parametrize("length", slow_but([7], [12, 7]))
@pytest.mark.sweep
def test_tokens_are_generated_with_a_cache(length: int) -> None:
    for ours, theirs, scattered in world(2).run(generated, length):
        assert ours == theirs
        assert len(ours[0]) == length + 5
        assert length % 2 == 0 or scattered == 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_prompt_is_split_where_it_can_be_and_the_tokens_after_it_are_not() -> None:
    assert [scattered for _, _, scattered in world(2).run(generated, 12)] == [5, 5]


def copied(member: Member) -> list[float]:
    stock, keywords = tiny_model("torch_transformer")
    one = tpplan.parallelize(copy.deepcopy(stock), "plans/torch_transformer-sequence.yaml", member.mesh(), keywords)
    other = copy.deepcopy(one)
    errors: list[float] = []
    for model, length in ((one, 12), (other, 13), (one, 12), (other, 12), (one, 13), (other, 13)):
        call = example_keywords("torch_transformer", sequence=length)
        errors.append(float((model(**call) - stock(**call)).abs().max()))
    return errors


@pytest.mark.processes
def test_a_copy_of_a_model_changes_programs_by_itself() -> None:
    assert max(error for errors in world(2).run(copied) for error in errors) < 1e-12

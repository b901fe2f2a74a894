"""Stages of pipelines by one plan for the whole model: each schedule, and what stages hand on."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import tpplan
from tests.marking import sweep_but
from tests.runtime.pipelines import (
    BATCH,
    HANDED_ON,
    HIDDEN,
    LENGTH,
    MICRO,
    PLAIN,
    SEQUENCE,
    Attention,
    Block,
    Model,
    cut,
    example,
    loss,
    made,
    whole,
    words,
)
from tests.runtime.world import Member, world
from tpplan.runtime.around.handing_on import Handing, layers_of, refuse_disagreeing

PLANS = {"plain": PLAIN, "sequence": SEQUENCE, "handed on": HANDED_ON}
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def planned(rules: Mapping[str, Any]) -> dict[str, Any]:
    return {"version": 1, "modules": dict(rules)}


def places(kind: Any, rank: int) -> list[int]:
    """The stages of a rank, of four or of two."""
    from torch.distributed.pipelining import schedules

    if not issubclass(kind, schedules.PipelineScheduleMulti):
        return [rank]
    folded = kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
    return [rank, 3 - rank] if folded else [rank, rank + 2]


class Sent:
    """The bytes that stages send to each other."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def __enter__(self) -> Sent:
        from torch.distributed.pipelining.stage import PipelineStage

        self._patches = [
            mock.patch.object(PipelineStage, name, self._counting(name, getattr(PipelineStage, name)))
            for name in ("get_fwd_send_ops", "get_bwd_send_ops")
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _counting(self, name: str, method: Any) -> Any:
        def call(stage: Any, chunk: int) -> Any:
            ops = method(stage, chunk)
            self.bytes[name] += sum(op.tensor.nbytes for op in ops)
            return ops

        return call


def stepped(
    member: Member, schedule: str, rules: Mapping[str, Any], recomputes: bool = False, frozen: bool = False
) -> tuple[float, dict[str, int]]:
    """Two steps of a pipeline: how far losses and gradients are from the unsharded model's, and what was sent."""
    from torch.distributed.pipelining import PipelineStage, schedules

    mesh = member.mesh(2, 2, names=("pp", "tp"))
    kind: Any = schedules.get_schedule_class(schedule)
    own = places(kind, mesh["pp"].get_local_rank())
    count = 2 * len(own)
    stock = made(recomputes=recomputes)
    if frozen:
        for name, parameter in stock.named_parameters():
            parameter.requires_grad_(not name.startswith(("embed", "layers.0")))
    models = {place: cut(stock, place, count) for place in own}
    for place, model in models.items():
        tpplan.parallelize(model, planned(rules), mesh["tp"], (example(place),), partial=True)
    tpplan.check_stages(models.values(), planned(rules), mesh["pp"])
    group = mesh["pp"].get_group()
    stages = [PipelineStage(m, place, count, torch.device("cpu"), group=group) for place, m in models.items()]
    runner = kind(stages if len(own) > 1 else stages[0], MICRO, loss_fn=loss)
    error, losses = 0.0, list[Tensor]()
    with Sent() as sent:
        for seed in (1, 3):
            for model in models.values():
                model.zero_grad()
            arguments = (words(seed),) if 0 in own else ()
            last = {"target": words(seed + 1), "losses": losses} if count - 1 in own else {}
            runner.step(*arguments, **last)
            expected, gradients = whole(stock, seed)
            if last:
                error = max(error, abs(float(torch.stack(losses[-MICRO:]).detach().mean()) - expected))
            for model in models.values():
                for name, parameter in model.named_parameters():
                    assert (parameter.grad is None) == (name not in gradients), name
                    if parameter.grad is not None:
                        found: Any = parameter.grad
                        error = max(error, float((found.full_tensor() - gradients[name]).abs().max()))
    return error, dict(sent.bytes)


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "plan"),
    sweep_but(
        [("1F1B", "plain"), ("Interleaved1F1B", "sequence"), ("ZBVZeroBubble", "handed on"), ("DualPipeV", "plain")],
        itertools.product(SCHEDULES, PLANS),
    ),
)
def test_a_step_of_a_pipeline_is_the_unsharded_models(schedule: str, plan: str) -> None:
    assert max(error for error, _ in world(4).run(stepped, schedule, PLANS[plan])) < 1e-12


@pytest.mark.processes
def test_a_stage_that_hands_its_part_on_sends_as_many_bytes_less_as_there_are_ranks() -> None:
    stream = 2 * BATCH * LENGTH * HIDDEN * 8  # of two steps, of one rank of `tp`
    (_, whole_first), *_, (_, whole_last) = world(4).run(stepped, "1F1B", SEQUENCE)
    (_, part_first), *_, (_, part_last) = world(4).run(stepped, "1F1B", HANDED_ON)
    assert whole_first["get_fwd_send_ops"] == whole_last["get_bwd_send_ops"] == stream
    assert part_first["get_fwd_send_ops"] == part_last["get_bwd_send_ops"] == stream // 2


@pytest.mark.one_in(5)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "recomputes", "frozen"),
    [("1F1B", True, False), ("InterleavedZeroBubble", True, False), ("Interleaved1F1B", False, True)],
)  # torch's zero-bubble schedules give a stage without gradients of its input none of its weights
def test_so_is_one_of_recomputed_layers_or_frozen_first_stages(schedule: str, recomputes: bool, frozen: bool) -> None:
    assert max(error for error, _ in world(4).run(stepped, schedule, HANDED_ON, recomputes, frozen)) < 1e-12


def tied(member: Member, rules: Mapping[str, Any]) -> float:
    """The error of the gradient of a table that the first stage looks up in, and the last multiplies by."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = member.mesh(2, 2, names=("pp", "tp"))
    place, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stock = made()
    assert stock.embed is not None and stock.head is not None
    stock.head.weight = stock.embed.weight
    model = cut(stock, place, 2)
    tpplan.parallelize(model, planned(rules), mesh["tp"], (example(place),), partial=True)
    runner = Schedule1F1B(PipelineStage(model, place, 2, torch.device("cpu"), group=group), MICRO, loss_fn=loss)
    runner.step(words(1)) if place == 0 else runner.step(target=words(2))
    held: Any = model.embed if place == 0 else model.head
    dist.all_reduce(held.weight.grad.to_local(), group=group)
    _, gradients = whole(stock, 1)
    return float((held.weight.grad.full_tensor() - gradients["embed.weight"]).abs().max())


@pytest.mark.processes
@pytest.mark.parametrize("rules", [PLAIN, HANDED_ON], ids=["plain", "handed on"])
def test_a_tied_tables_gradient_is_the_sum_over_the_first_and_the_last_stage(rules: Mapping[str, Any]) -> None:
    assert max(world(4).run(tied, rules)) < 1e-12


@pytest.mark.parametrize(
    ("tp", "place", "plan"),
    sweep_but(
        [(2, 0, "handed on"), (4, 1, "handed on"), (2, 2, "handed on"), (2, 1, "plain")],
        itertools.product([2, 4], range(3), PLANS),
    ),
)
def test_each_stage_is_verified_by_itself(tp: int, place: int, plan: str) -> None:
    stage = cut(made(layers=3), place, 3)
    report = tpplan.verify(stage, planned(PLANS[plan]), tp, (example(place),), partial=True)
    assert report.ok and report.collectives == report.predicted, report


def test_what_a_stage_is_passed_and_hands_on_is_in_its_program() -> None:
    def boundaries(rules: Mapping[str, Any], place: int) -> tuple[bool, bool]:
        stage = cut(made(), place, 4)
        program = tpplan.compile_plan(stage, planned(rules), 2, (example(place),), partial=True)
        return bool(program.arriving), program.hands_on

    assert [boundaries(HANDED_ON, place) for place in range(4)] == [
        (False, True),
        (True, True),
        (True, True),
        (True, False),
    ]
    assert [boundaries(SEQUENCE, place) for place in range(4)] == [(False, False)] * 4


def test_a_whole_model_takes_the_same_plan_and_whole_tensors() -> None:
    report = tpplan.verify(made(), planned(HANDED_ON), 2, (words(1)[:2],))
    assert report.ok, report


def test_pins_of_a_plan_for_a_whole_model_split_what_arrives_whole() -> None:
    rules = {name: rule for name, rule in HANDED_ON.items() if name.startswith("layers")}
    stage, x = cut(made(), 1, 4), example(1)
    assert not tpplan.compile_plan(stage, planned(rules), 2, (x,)).arriving
    assert tpplan.verify(stage, planned(rules), 2, (x,)).ok


def test_a_plan_for_the_model_is_for_a_stage_only_if_that_is_said() -> None:
    stage = cut(made(), 1, 4)
    with pytest.raises(tpplan.CompileError, match="TP012") as caught:
        tpplan.compile_plan(stage, planned(PLAIN), 2, (example(1),))
    assert [held.subject for held in caught.value.diagnostics] == ["embed", "head"]
    program = tpplan.compile_plan(stage, planned(PLAIN), 2, (example(1),), partial=True)
    assert program.count_collectives() == {"all-reduce": 4} and not program.diagnostics


def test_a_stage_of_which_the_plan_says_nothing_is_whole() -> None:
    program = tpplan.compile_plan(
        torch.nn.LayerNorm(HIDDEN), planned(PLAIN), 2, (torch.zeros(2, 4, HIDDEN),), partial=True
    )
    assert not program.count_collectives()


MISSPELT = {**PLAIN, "layers.*.atention.o": "rowwise", "layers.9.up": "none"}


def test_a_pattern_that_matches_in_no_stage_is_told_by_who_sees_them_all() -> None:
    stages = [cut(made(), place, 2) for place in range(2)]
    for place, stage in enumerate(stages):
        tpplan.compile_plan(stage, planned(MISSPELT), 2, (example(place),), partial=True)
    tpplan.check_stages(stages, planned(PLAIN))
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.check_stages(stages, planned(MISSPELT))
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP012" and "did you mean `layers.*.attention.o`" in (finding.help or "")
    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.check_stages(stages, planned({**PLAIN, "elsewhere.gate": "rowwise"}))
    assert "the model has modules such as" in str(caught.value) and "partial" not in str(caught.value)
    with pytest.raises(tpplan.CompileError, match="TP012"):
        tpplan.check_stages(stages[1], planned(PLAIN))


def compared(member: Member) -> list[str]:
    mesh = member.mesh(2, 2, names=("pp", "tp"))
    stage = cut(made(), mesh["pp"].get_local_rank(), 2)
    found: list[str] = []
    for rules in (PLAIN, MISSPELT):
        try:
            tpplan.check_stages(stage, planned(rules), mesh["pp"])
            found.append("")
        except tpplan.CompileError as error:
            found.append(error.diagnostics[0].code)
    return found


@pytest.mark.processes
def test_on_all_ranks_of_the_pipeline() -> None:
    assert world(4).run(compared) == [["", "TP012"]] * 4


def called(member: Member) -> list[tuple[float, tuple[int, ...]]]:
    """A stage called with its parts: in training, in evaluation, without gradients, and with other lengths."""
    mesh = member.mesh()
    stage = tpplan.parallelize(cut(made(), 1, 4), planned(HANDED_ON), mesh, (example(1),), partial=True)
    stock = cut(made(), 1, 4)
    found: list[tuple[float, tuple[int, ...]]] = []
    kinds = (
        (8, True, True),
        (8, True, True),
        (8, False, False),
        (4, True, True),
        (12, False, False),
    )
    for length, training, gradients in kinds:
        x = torch.randn(2, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        with torch.set_grad_enabled(gradients):
            part = stage.train(training)(x.chunk(member.size, 1)[member.rank])
            expected = stock.train(training)(x).chunk(member.size, 1)[member.rank]
        found.append((float((part - expected).abs().max().detach()), tuple(part.shape)))
    return found


@pytest.mark.processes
def test_a_stage_takes_parts_of_any_length_in_any_mode() -> None:
    for found in world(2).run(called):
        assert max(error for error, _ in found) < 1e-12
        assert [shape[1] for _, shape in found] == [4, 4, 4, 2, 6]


class ByEither(Model):
    """A first stage that may be passed what its table would give."""

    def forward(self, ids: Tensor | None = None, embeds: Tensor | None = None) -> Any:  # pyright: ignore
        assert self.embed is not None
        x = self.embed(ids) if embeds is None else embeds
        for layer in self.layers.values():
            x = layer(x)
        return x


def passed_otherwise(member: Member) -> None:
    """A whole tensor under a name that the example hasn't; the same tensor on all ranks, where each has a part."""
    torch.manual_seed(0)
    stock = cut(ByEither().double(), 0, 4)
    ids = example(0)
    first = tpplan.parallelize(copy.deepcopy(stock), planned(HANDED_ON), member.mesh(), {"ids": ids}, partial=True)
    due = stock(ids).chunk(member.size, 1)[member.rank]
    for call in ({"ids": ids}, {"embeds": stock.embed(ids).detach()}):  # pyright: ignore
        torch.testing.assert_close(first(**call), due, rtol=1e-12, atol=1e-12)
    x = example(1)
    second = tpplan.parallelize(cut(made(), 1, 4), planned(HANDED_ON), member.mesh(), (x,), partial=True)
    with pytest.raises(tpplan.TpplanError, match=r"TP192.*were all passed the same tensor"):
        second(x)
    same = torch.ones(2, LENGTH // member.size, HIDDEN, dtype=torch.float64)  # places don't differ
    assert second(same).shape == same.shape
    with pytest.raises(tpplan.TpplanError, match=r"TP117.*can't be called by themselves"):
        second.get_submodule("layers.1.norm_1")(same)


@pytest.mark.processes
def test_parts_are_told_from_whole_tensors() -> None:
    world(2).run(passed_otherwise)


class WithPositions(Model):
    """Hands its layers what another module has made of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        self.positions(x)
        return super().forward(x)


def test_others_may_be_passed_the_stream_before_its_layers() -> None:
    stage = cut(WithPositions().double(), 1, 4)
    assert tpplan.compile_plan(stage, planned(HANDED_ON), 2, (example(1),), partial=True).arriving


class Branching(Attention):
    """Does something else with short sequences, which it sees whole."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] > 6 else super().forward(2 * x)


class Misled(Block):
    """Does something else with short sequences, and takes a rank's part for one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] > 3 else super().forward(x) + 1


def with_lengths(member: Member) -> list[float]:
    """The errors of calls of stages that branch on the length that they see."""
    errors: list[float] = []
    for kind in (Branching, Misled):
        torch.manual_seed(0)
        stock = cut(made(), 1, 4)
        if kind is Misled:
            stock.layers["1"] = Misled().double()
        else:
            stock.layers["1"].attention = Branching().double()
        stage = copy.deepcopy(stock)
        tpplan.parallelize(stage, planned(HANDED_ON), member.mesh(), (example(1),), partial=True)
        for length in (8, 4, 8, 4):
            x = torch.randn(2, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
            part, expected = stage(x.chunk(member.size, 1)[member.rank]), stock(x).chunk(member.size, 1)[member.rank]
            errors.append(float((part - expected).detach().abs().max()))
    return errors


@pytest.mark.processes
def test_a_part_of_another_length_is_proved_as_a_part_of_that() -> None:
    for errors in world(2).run(with_lengths):
        assert max(errors) < 1e-12, errors


def counted(member: Member) -> tuple[int, int]:
    """The collectives of a stage's forward and backward, and those that its program has."""
    stage = tpplan.parallelize(cut(made(), 1, 4), planned(HANDED_ON), member.mesh(), (example(1),), partial=True)
    part = example(1).detach().chunk(member.size, 1)[member.rank].requires_grad_()
    counts: list[int] = []
    for _ in range(2):  # the first call is proved, and compared
        with CommDebugMode() as mode:
            stage(part).sum().backward()
        counts.append(mode.get_total_counts())
    program = tpplan.compile_plan(cut(made(), 1, 4), planned(HANDED_ON), member.size, (example(1),), partial=True)
    return counts[-1], program.count_collectives().total()


@pytest.mark.processes
def test_a_stage_runs_the_collectives_of_its_program() -> None:
    for ran, predicted in world(2).run(counted):
        assert ran == predicted == 9, (ran, predicted)


def odd(member: Member) -> str:
    mesh = member.mesh()
    stage = tpplan.parallelize(cut(made(), 0, 2), planned(HANDED_ON), mesh, (example(0),), partial=True)
    try:
        stage(torch.zeros(2, 7, dtype=torch.int64))
    except tpplan.UnevenShardError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_sequence_that_a_stage_cannot_hand_on_in_parts_is_refused() -> None:
    for said in world(2).run(odd):
        assert "TP118" in said and "pad the sequence to a multiple of 2" in said


class Remembering(Model):
    """A stage that takes what earlier calls left."""

    def forward(self, x: Tensor, past: Past | None = None) -> Any:  # pyright: ignore
        return super().forward(x if past is None else x + past.keys.mean())


class Past:
    """As a cache: an object with tensors in it."""

    def __init__(self) -> None:
        self.keys = torch.zeros(2, 4, LENGTH, 4, dtype=torch.float64)


def going_on(member: Member) -> str:
    torch.manual_seed(0)
    stage = cut(Remembering().double(), 1, 4)
    tpplan.parallelize(stage, planned(HANDED_ON), member.mesh(), (example(1),), partial=True)
    with pytest.raises(tpplan.UnevenShardError) as caught, torch.no_grad():
        stage(example(1).chunk(member.size, 1)[member.rank], past=Past())
    return str(caught.value)


@pytest.mark.processes
def test_a_call_that_goes_on_from_a_cache_is_not_told_of_an_odd_sequence() -> None:
    for said in world(2).run(going_on):
        assert "TP118" in said and "this call goes on from a cache" in said
        assert "pad the sequence" not in said and "evenly" not in said


RETURNS = {**SEQUENCE, "layers.{0,1}": {"style": "replicate", "input": "sequence", "output": "sequence"}}
TAKES = {**SEQUENCE, "layers.{2,3}": {"style": "replicate", "input": "sequence", "output": "sequence"}}


def disagreeing(member: Member, rules: Mapping[str, Any], ours: bool) -> str:
    """What is said of two stages, each on a rank of its own, or both on each rank."""
    mesh = member.mesh(2, 2, names=("pp", "tp"))
    places = (0, 1) if ours else (mesh["pp"].get_local_rank(),)
    stages = [cut(made(), place, 2) for place in places]
    tpplan.check_stages(stages, planned(rules), None if ours else mesh["pp"])  # nothing is known yet
    for place, stage in zip(places, stages, strict=True):
        tpplan.parallelize(stage, planned(rules), mesh["tp"], (example(place),), partial=True)
    try:
        tpplan.check_stages(stages[::-1], planned(rules), None if ours else mesh["pp"])
    except tpplan.CompileError as error:
        return str(error)
    return ""


@pytest.mark.one_in(5)
@pytest.mark.processes
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (RETURNS, ("from `layers.0` on returns each rank's part", "takes whole sequences", "write `input: sequence`")),
        (TAKES, ("from `layers.0` on returns whole", "from `layers.2` on takes each rank's part", "remove `input`")),
        (HANDED_ON, ()),
        (SEQUENCE, ()),
    ],
    ids=["returns", "takes", "both", "neither"],
)
def test_stages_that_do_not_take_what_the_ones_before_return_are_told(
    rules: Mapping[str, Any], says: tuple[str, ...], ours: bool
) -> None:
    for said in world(4).run(disagreeing, rules, ours):
        assert bool(said) == bool(says) and all(part in said for part in says), said
        assert not says or "TP195" in said


def test_stages_go_by_the_lists_that_all_have_layers_of() -> None:
    def stage(names: dict[str, int], takes: bool = True, returns: bool = True) -> Handing:
        return Handing(names, takes, returns)

    first, last = stage({"layers.": 0}, takes=False), stage({"layers.": 8, "head.": 1}, returns=False)
    refuse_disagreeing([last, stage({"layers.": 4}), first, stage({}, returns=False)])
    refuse_disagreeing([stage({"encoder.": 0}, returns=False), stage({"decoder.": 1})])
    refuse_disagreeing([stage({"a.": 0, "b.": 1}, returns=False), stage({"a.": 1, "b.": 0})])
    with pytest.raises(tpplan.CompileError, match=r"from `layers.0` on .* `layers.8` on takes each rank's part"):
        refuse_disagreeing([last, stage({"layers.": 0, "embed.": 2}, returns=False)])
    model = cut(made(), 1, 2)
    model.add_module("fc1", nn.Sequential(nn.Linear(2, 2)))
    assert layers_of(model) == {"layers.": 2, "fc1.": 0}


def loaded(member: Member, folder: str) -> tuple[float, int, list[str], str]:
    """How far a stage's parameters are from the model's, the bytes that were read, warnings, and what was refused."""
    mesh = member.mesh(2, 2, names=("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    stock = made()
    with torch.device("meta"):
        stage = Model().double()
    stage = cut(stage, place, 2)
    tpplan.parallelize(stage, planned(PLAIN), mesh["tp"], (example(place),), partial=True)
    amounts: list[tuple[int, int]] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            tpplan.load_weights(stage, folder, partial=True, progress=lambda *held: amounts.append(held))
        except tpplan.CheckpointError as error:
            return 0.0, 0, [], str(error)
    whole_ones = dict(stock.named_parameters())
    error = max(float((held.full_tensor() - whole_ones[name]).abs().max()) for name, held in stage.named_parameters())  # pyright: ignore
    return error, amounts[-1][0], [str(held.message) for held in told], ""


@pytest.mark.processes
def test_a_stage_reads_its_own_parts_of_the_whole_model(tmp_path: Path) -> None:
    stock = made()
    tpplan.save_weights(stock, tmp_path / "whole")
    own = sum(p.numel() for name, p in stock.named_parameters() if name.startswith(("layers.0.", "layers.1.", "embed")))
    for rank, (error, read, told, refused) in enumerate(world(4).run(loaded, str(tmp_path / "whole"))):
        assert (error, told, refused) == (0.0, [], "")
        assert rank > 1 or own * 8 / 2 <= read < own * 8 * 0.6
    state = {name: held for name, held in stock.state_dict().items() if name != "layers.3.up.weight"}
    (tmp_path / "part").mkdir()
    save_file(state, tmp_path / "part" / "model.safetensors")
    found = [refused for *_, refused in world(4).run(loaded, str(tmp_path / "part"))]
    assert found[:2] == ["", ""] and all("`layers.3.up.weight` is not in the checkpoint" in text for text in found[2:])

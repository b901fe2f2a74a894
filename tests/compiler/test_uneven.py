"""Sizes that the axis doesn't divide: what each rank gets, which ranks are checked, and what can't be shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, Attention, Mlp, codes, compiled, reshards, x_BSH
from tests.models.tiny import tiny_model
from tests.models.uneven import GATED, MLP, Gated
from tests.zoo.architectures import build
from tpplan.compiler.check import local_run as check_module
from tpplan.compiler.check.local_run import PassedCall, check, different_ranks
from tpplan.compiler.check.same_steps import CheckInput, Mismatch
from tpplan.compiler.ir.program import LocalAttribute
from tpplan.inputs import example_call
from tpplan.report.program_page import render_program


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ranks whose shapes each check of a compilation ran on."""
    found: list[list[int]] = []

    def spying(given: CheckInput, *more: Any) -> Mismatch | PassedCall:
        found.append(different_ranks(given))
        return check(given, *more)

    monkeypatch.setattr("tpplan.compiler.check.local_run.check", spying)
    return found


@pytest.mark.parametrize(
    ("features", "tp", "kinds"),
    [(32, 4, [0]), (107, 2, [0, 1]), (107, 4, [0, 3]), (6, 4, [0, 2]), (9, 4, [0, 1]), (13, 8, [0, 5])],
)
def test_each_kind_of_rank_is_checked_once(features: int, tp: int, kinds: list[int], ranks: list[list[int]]) -> None:
    program = compiled(Mlp(intermediate=features), MLP, tp=tp)
    assert ranks == [kinds]
    assert not program.diagnostics
    assert reshards(program) == reshards(compiled(Mlp(intermediate=32), MLP, tp=tp))


def test_parameters_tell_what_each_rank_stores() -> None:
    up = next(p for p in compiled(Mlp(intermediate=107), MLP, tp=4).parameters if p.name == "up.weight")
    assert [up.stored_shape(4, rank)[0] for rank in range(4)] == [27, 27, 27, 26]
    assert up.local_shape == (27, HIDDEN)


@pytest.mark.parametrize(("features", "tp"), [(13, 8), (9, 4), (6, 4), (5, 4), (100, 16)])
def test_no_rank_is_left_without_features(features: int, tp: int) -> None:
    program = compiled(Mlp(intermediate=features), MLP, tp=tp)
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        held = next(p for p in program.parameters if p.name == name)
        counts = [held.stored_shape(tp, rank)[dim] for rank in range(tp)]
        assert sum(counts) == features
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] == 1


class Classed(nn.Module):
    """A body with as many features as there are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 9), nn.Linear(9, 8), nn.Linear(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu()))


def test_classes_are_those_of_chunks_whatever_has_as_many_features() -> None:
    rules = {"up": "colwise", "down": "rowwise", "head": {"style": "colwise", "output": "shard"}}
    plan, x = {"version": 1, "modules": rules}, torch.randn(2, 8)
    program = tpplan.compile_plan(Classed(), plan, 4, x)
    stored = {p.name: [p.stored_shape(4, rank)[0] for rank in range(4)] for p in program.parameters}
    assert stored["up.weight"] == [3, 2, 2, 2] and stored["head.weight"] == [3, 3, 3, 0]
    assert tpplan.verify(Classed(), plan, 4, x).ok


def test_a_count_becomes_local_on_each_rank() -> None:
    program = compiled(Gated(107, remembers=True), GATED, tp=4)
    (found,) = (module.local_attributes for module in program.modules if module.local_attributes)
    assert found == (LocalAttribute("features", 107, 27, (27, 27, 27, 26)),)
    assert [found[0].on(rank) for rank in range(4)] == [27, 27, 27, 26]
    assert tpplan.Program.from_dict(program.to_dict()) == program


def test_a_plan_may_name_a_count_that_the_axis_does_not_divide() -> None:
    model = nn.Sequential(Gated(107, remembers=True))
    rules = {f"0.{name}": rule for name, rule in GATED.items()}
    program = compiled(model, {**rules, "0": {"style": "replicate", "local": ["features"]}})
    (found,) = (module.local_attributes for module in program.modules if module.local_attributes)
    assert found == (LocalAttribute("features", 107, 54, (54, 53)),)


def test_a_literal_in_the_body_is_seen() -> None:
    class Literal(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).view(*x.shape[:2], 107).relu())

    program = compiled(Literal(intermediate=107), MLP)
    assert "up (): S(2) -> R" in reshards(program)
    assert [d.code for d in program.diagnostics] == ["TP104", "TP105"]


def test_a_literal_that_fits_the_first_rank_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Literal(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(h[..., :54].sigmoid() if h.shape[-1] < 54 else h.relu())

    assert "up (): S(2) -> R" in reshards(compiled(Literal(intermediate=107), MLP))
    monkeypatch.setattr(check_module, "different_ranks", lambda given: [0])
    assert "up (): S(2) -> R" not in reshards(compiled(Literal(intermediate=107), MLP))


def test_views_of_an_uneven_dim_are_split_by_whole_entries_or_refused() -> None:
    """9 entries of 3 features are 5|4 entries, but 27 features are 14|13."""

    class Cut(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu().view(-1, 9, 3).cos().view(*x.shape[:2], -1))

    up = next(p for p in compiled(Cut(intermediate=27), MLP).parameters if p.name == "up.weight")
    assert [up.stored_shape(2, rank)[0] for rank in range(2)] == [15, 12]
    with pytest.raises(tpplan.CompileError) as raised:
        compiled(Cut(intermediate=27), MLP, tp=10)
    assert codes(raised.value)[0] == "TP103"


@pytest.mark.parametrize("rule", ["colwise", {"style": "colwise", "packed": {"a": 3, "b": 30}}])
def test_fewer_features_than_ranks_are_refused(rule: Any) -> None:
    features = 3 if rule == "colwise" else 33
    with pytest.raises(tpplan.CompileError) as raised:
        compiled(Mlp(intermediate=features), {"up": rule}, tp=4)
    assert codes(raised.value) == ["TP102"]
    assert "has 3 features for 4 ranks" in str(raised.value)


def test_heads_are_not_cut() -> None:
    program = compiled(Attention(), {"{q,k,v}": "colwise", "o": "rowwise"}, tp=3)
    assert {p.stored_shape(3, 2)[0] for p in program.parameters if p.name == "q.weight"} == {HIDDEN // 4}
    with pytest.raises(tpplan.CompileError) as raised:
        compiled(Attention(), {"{q,k,v}": "colwise", "o": "rowwise"}, tp=5)
    assert set(codes(raised.value)) == {"TP103"}
    assert "4 heads, fewer than the 5 ranks" in str(raised.value)


def test_an_odd_vocabulary_is_split() -> None:
    table = nn.Embedding(50257, 4, padding_idx=50256, device="meta")
    program = compiled(nn.Sequential(table), {"0": "vocab"}, torch.zeros(3, 12, dtype=torch.long), tp=4)
    assert [program.parameters[0].stored_shape(4, rank)[0] for rank in range(4)] == [12565, 12565, 12565, 12562]


def test_explain_shows_what_differs_between_ranks() -> None:
    text = render_program(compiled(Gated(107, remembers=True), GATED, x_BSH(), tp=4))
    assert "(214, 16) → (54|52, 16)" in text
    assert "features 107 → 27|26" in text
    assert "a|b: what the ranks hold, where it differs" in text
    assert "a|b" not in render_program(compiled(Mlp(), MLP))


@pytest.mark.parametrize(("tp", "tokens"), [(2, 16), (3, 24), (8, 64), (12, 72), (16, 64), (32, 64), (64, 128)])
def test_a_made_up_sequence_can_be_split_and_hardly_grows(tp: int, tokens: int) -> None:
    """Attention takes its square."""
    model, _ = tiny_model("llama", device="meta", max_position_embeddings=4096)
    _, keywords = example_call(model, tp)
    assert tuple(keywords["input_ids"].shape) == (3, tokens)
    assert tokens % tp == 0 and tokens // tp >= 2


def test_a_norm_over_heads_that_ranks_share_says_which_entries_they_have() -> None:
    model, call = build("olmo2")
    with pytest.raises(tpplan.CompileError) as raised:
        tpplan.compile_plan(model, "olmo2", 3, call)
    assert "of the 12 entries of dim 2 the ranks hold 0-5, 0-11, 6-11, some of them several times" in str(raised.value)
    with pytest.raises(tpplan.CompileError, match=r"hold 0-5, 0-5, 0-5, 6-11, …, some of them several times"):
        tpplan.compile_plan(model, "olmo2", 7, call)


@pytest.mark.parametrize("tp", [6, 7])  # of which one divides the features
def test_fewer_heads_than_ranks_have_one_code(tp: int) -> None:
    model, call = build("bart")
    with pytest.raises(tpplan.CompileError) as raised:
        tpplan.compile_plan(model, "bart", tp, call)
    assert {found.code for found in raised.value.errors} == {"TP103"}
    assert "4 heads, fewer than the" in str(raised.value)

"""Where reshards go, on models small enough to know the best answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.compiler.toys import (
    ATTENTION,
    HIDDEN,
    MLP,
    SEQUENCE,
    Attention,
    Block,
    Mlp,
    Normed,
    X,
    codes,
    compiled,
    plan_of,
    reshards,
    x_BSH,
)
from tpplan.compiler.ir.layout import PARTIAL
from tpplan.compiler.place import place


def inside(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules for the body of a block."""
    return {f"body.{name}": style for name, style in rules.items()}


def test_a_pair_of_linears_costs_one_sum_each_way() -> None:
    program = compiled(Block(Mlp()), inside(MLP))
    assert sorted(reshards(program)) == ["body x: R -> R·∂P", "body.down (): P -> R"]
    assert program.count_collectives() == {"all-reduce": 2}


def test_q_k_and_v_share_the_sum_of_their_input_gradients() -> None:
    program = compiled(Block(Attention()), inside(ATTENTION))
    assert "body x: R -> R·∂P" in reshards(program)
    assert not any(line.startswith(("body.q", "body.k", "body.v")) for line in reshards(program))
    assert program.count_collectives() == {"all-reduce": 2}


def test_q_k_and_v_share_one_gather_of_a_sequence() -> None:
    program = compiled(stack(Attention), in_stack(ATTENTION))
    assert "0.body x: S(1) -> R·∂P" in reshards(program)
    assert "0.body.o (): P -> S(1)" in reshards(program)
    # Two gathers and two scatters each way for two blocks, and the ends of the sequence region.
    assert program.count_collectives() == {"all-gather": 6, "reduce-scatter": 4, "all-reduce": 1}


def stack(body: type[nn.Module]) -> nn.Module:
    """Two blocks and a last norm."""
    return nn.Sequential(Block(body()), Block(body()), nn.LayerNorm(HIDDEN))


def in_stack(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules for a stack whose residual stream lies split along the sequence."""
    return {**{f"*.body.{name}": style for name, style in rules.items()}, "*.norm": "sequence", "2": "sequence"}


def test_a_rowwise_bias_is_added_after_the_sum() -> None:
    program = compiled(Mlp(), MLP)
    assert "down (): P -> R" in reshards(program)
    assert all(p.layout != PARTIAL for p in program.parameters)


def test_biases_of_partial_results_that_are_added_are_added_on_one_rank() -> None:
    program = compiled(TwoWays(bias=True), TWO_WAYS)
    assert program.count_collectives(backward=False) == {"all-reduce": 1}
    assert {p.name for p in program.parameters if p.layout == PARTIAL} == {"one.down.bias", "two.down.bias"}


class TwoWays(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one, self.two = Mlp(bias), Mlp(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


TWO_WAYS = {"{one,two}.up": "colwise", "{one,two}.down": "rowwise"}


def test_two_partial_results_are_added_before_they_are_summed_over_the_ranks() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = TwoWays(bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.ways(x).exp()

    program = compiled(Around(), {f"ways.{name}": style for name, style in TWO_WAYS.items()})
    assert "ways (): P -> R" in reshards(program)
    assert program.count_collectives(backward=False) == {"all-reduce": 1}


def test_a_view_by_the_whole_length_at_the_end_gathers_there_and_not_before() -> None:
    class Viewed(nn.Module):
        """As GPT-2 has it: the last result is viewed by the shape of the input, that was remembered."""

        def __init__(self) -> None:
            super().__init__()
            self.body = stack(Mlp)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.body.children():
                x = block(x)
            return x.view(-1, X[1], HIDDEN)

    rules = {f"body.{name}": style for name, style in in_stack(MLP).items()}
    found = reshards(compiled(Viewed(), rules))
    assert "body.2 (): S(1) -> R" in found
    assert "body.1.body.down (): P -> S(1)" in found


def test_norms_in_a_sequence_region_have_their_gradients_summed_and_others_do_not() -> None:
    summed = {p.name for p in compiled(stack(Mlp), in_stack(MLP)).summed_parameters}
    norms = {f"{name}.{leaf}" for name in ("0.norm", "1.norm", "2") for leaf in ("weight", "bias")}
    assert summed == norms | {"0.body.down.bias", "1.body.down.bias"}
    assert not compiled(Block(Mlp()), inside(MLP)).summed_parameters


def test_a_norm_on_heads_has_its_gradient_summed() -> None:
    class HeadNorm(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.head_norm = nn.LayerNorm(self.head_dim)

        def forward(self, x: Tensor) -> Tensor:
            batch, sequence, _ = x.shape
            q = self.head_norm(self.q(x).view(batch, sequence, -1, self.head_dim))
            return self.o(q.flatten(2))

    program = compiled(HeadNorm(), {"q": "colwise", "o": "rowwise"})
    assert {p.name for p in program.summed_parameters} == {"head_norm.weight", "head_norm.bias"}


def test_position_ids_are_made_for_the_whole_sequence() -> None:
    class PositionTrap(nn.Module):
        """The body of the model reads the sequence's length off a tensor that could lie split."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(32, HIDDEN)
            self.positions = nn.Embedding(64, HIDDEN)
            self.block = Block(Mlp())

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            positions = torch.arange(x.shape[1], device=x.device)
            return self.block(x + self.positions(positions))

    rules = {"tokens": "vocab", **{f"block.{k}": v for k, v in {**inside(MLP), **SEQUENCE}.items()}}
    program = compiled(PositionTrap(), rules, torch.zeros(3, 12, dtype=torch.long, device="meta"))
    assert "tokens (): P -> R" in reshards(program)
    assert any(": R -> S(1)" in line for line in reshards(program))


@pytest.mark.parametrize(
    "divide",
    [
        lambda h: h / h.shape[1],
        lambda h: h / torch.tensor(float(h.shape[1]), device=h.device),
        lambda h: h / torch.tensor(float(h.shape[1])),
        lambda h: h * torch.full((), 1 / h.shape[1], device=h.device),
        lambda h: h / torch.ones(h.shape[1], device=h.device).sum(),
        lambda h: h * torch.arange(h.shape[1])[:, None],
        lambda h: torch.roll(h, h.shape[1] // 2, -1),
        lambda h: h.mean(1, keepdim=True) + h,
        lambda h: h.cumsum(1),
        lambda h: h.softmax(1),
        lambda h: h[:, -1:] + h,
        lambda h: h.flip(1),
    ],
)
def test_a_body_that_needs_the_whole_sequence_gets_it_whole(divide: Any) -> None:
    class Reads(Normed):
        def after(self, h: Tensor, x: Tensor) -> Tensor:
            return self.proj(divide(h))

    program = compiled(Reads(), SEQUENCE)
    assert "norm (): S(1) -> R" in reshards(program)


def test_a_body_that_divides_by_a_split_width_is_refused_or_gets_it_whole() -> None:
    class Scaled(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(h / h.shape[-1] ** 0.5)

    program = compiled(Scaled(), MLP)
    assert "up (): S(2) -> R" in reshards(program)
    assert [d.code for d in program.diagnostics] == ["TP104", "TP105"]


@pytest.mark.parametrize("output", ["replicate", "shard"])
def test_an_output_pin_holds(output: str) -> None:
    program = compiled(Normed(), {"proj": {"style": "colwise", "output": output}})
    assert ("proj (): S(2) -> R" in reshards(program)) == (output == "replicate")
    assert not program.diagnostics


def test_a_pin_that_no_layout_satisfies_is_a_finding() -> None:
    with pytest.raises(tpplan.CompileError) as raised:
        compiled(Normed(), SEQUENCE, x_BSH(3, 11, HIDDEN))
    assert codes(raised.value) == ["TP114"]


def test_frozen_parameters_leave_partial_results_summed() -> None:
    model = Block(Mlp())
    model.requires_grad_(False)
    program = compiled(model, inside(MLP), x_BSH())
    assert reshards(program) == ["body.down (): P -> R"]
    assert not program.summed_parameters


def test_a_packed_projection_is_refused() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.Linear(HIDDEN, 64)
            self.down = nn.Linear(32, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(functional.silu(gate) * up)

    with pytest.raises(tpplan.CompileError) as raised:
        compiled(Packed(), {"gate_up": "colwise", "down": "rowwise"})
    assert "TP106" in codes(raised.value)


def test_packs_where_the_model_has_none_are_to_be_removed() -> None:
    rules = {"q": {"style": "colwise", "packed": ["q", "k"]}, "{k,v}": "colwise", "o": "rowwise"}
    with pytest.raises(tpplan.CompileError, match=r"uses its 16 features as one") as raised:
        compiled(Attention(), rules)
    assert "remove `packed`" in str(raised.value)


def test_equal_layers_are_placed_alike() -> None:
    model = nn.Sequential(*(Block(Mlp()) for _ in range(4)))
    program = compiled(model, {f"*.{name}": style for name, style in inside(MLP).items()})
    by_layer = [[line[1:] for line in reshards(program) if line.startswith(str(i))] for i in range(4)]
    assert by_layer[0] and all(lines == by_layer[0] for lines in by_layer)


def test_a_write_in_place_is_fine_where_all_is_whole_and_refused_where_another_alias_is_read() -> None:
    class Writes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            view = h.view(-1, h.shape[-1])
            h.add_(1)
            return self.down(view.view(h.shape) + h)

    class Whole(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            view = y.view(-1)
            y.mul_(2)
            return super().forward(view.view(x.shape) + y)

    with pytest.raises(tpplan.CompileError) as raised:
        compiled(Writes(), {"up": {"style": "colwise", "output": "shard"}, "down": "rowwise"})
    assert "TP113" in codes(raised.value)
    assert compiled(Whole(), MLP).count_collectives(backward=False) == {"all-reduce": 1}


def test_a_result_may_be_written_to_once_it_is_resharded() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            y = self.mlp(x)
            y += x
            return functional.relu_(y)

    program = compiled(InPlace(), {f"mlp.{name}": style for name, style in MLP.items()})
    assert "mlp.down (): P -> R" in reshards(program)


def test_a_plan_without_matching_sharding_is_a_plain_program() -> None:
    program = tpplan.compile_plan(Mlp(), plan_of({"up": "replicate"}), 2, (x_BSH(),))
    assert not reshards(program) and not program.count_collectives()


class Distances(nn.Module):
    """A bias for each head, which the model makes and both blocks add."""

    def __init__(self, literal: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList(Biased(literal) for _ in range(2))

    def forward(self, x_BSH: Tensor) -> Tensor:
        places = torch.arange(x_BSH.shape[1])
        bias_NSS = self.table((places[:, None] - places).abs()).permute(2, 0, 1)
        for block in self.blocks:
            x_BSH = x_BSH + block(x_BSH, bias_NSS)
        return x_BSH


class Biased(nn.Module):
    def __init__(self, literal: bool) -> None:
        super().__init__()
        self.literal = literal
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BSH: Tensor, bias_NSS: Tensor) -> Tensor:
        sizes = (4, -1) if self.literal else (-1, HIDDEN // 4)
        q, k, v = (t.unflatten(-1, sizes).transpose(1, 2) for t in self.qkv(x_BSH).chunk(3, -1))
        weights = (q @ k.mT + bias_NSS).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_batch_as_large_as_the_number_of_heads_is_placed_as_any_other(norm: bool, literal: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(HIDDEN), Distances(literal)).double()
    rules: dict[str, Any] = {
        "1.blocks.*.qkv": {"style": "colwise", "packed": ["q", "k", "v"]}, "1.blocks.*.out": "rowwise",
        **({"0": "sequence"} if norm else {}),
    }  # fmt: skip
    reports = [
        tpplan.verify(model, plan_of(rules), 2, (torch.randn(batch, 8, HIDDEN, dtype=torch.float64),))
        for batch in (3, 4)
    ]
    assert all(report.ok for report in reports), [report.problems for report in reports]
    assert reports[0].collectives == reports[1].collectives == reports[1].predicted


class Scan(nn.Module):
    """A recurrence step by step, whose results wait to be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gates = nn.Linear(HIDDEN, 2 * WIDE), nn.Linear(HIDDEN, 2 * WIDE)
        self.out = nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        (h, gate), (kept, given) = self.inner(x).chunk(2, -1), self.gates(x).chunk(2, -1)
        state, found = torch.zeros(x.shape[0], WIDE, 4), list[Tensor]()
        for t in range(x.shape[1]):
            state = state * kept[:, t, :, None].sigmoid() + (given[:, t] * h[:, t])[:, :, None]
            found.append((state @ x[:, t, :4, None])[..., 0])
        return self.out(torch.stack(found, 1) * gate)


WIDE = 2 * HIDDEN


@pytest.mark.slow
def test_steps_of_a_scan_do_not_multiply_the_ways_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alike, sizes = place._alike, list[int]()

    def noted(states: Any, joined: Any) -> Any:
        sizes.append(len(states))
        return alike(states, joined)

    monkeypatch.setattr(place, "_alike", noted)
    rules = {"inner": {"style": "colwise", "packed": {"h": WIDE, "gate": WIDE}}, "out": "rowwise"}
    most: list[int] = []
    for length in (8, 24):
        program = compiled(Block(Scan()), inside(rules), torch.randn(2, length, HIDDEN))
        assert "body.out (): P -> R" in reshards(program)
        most.append(max(sizes))
    assert most[1] < 2 * most[0]

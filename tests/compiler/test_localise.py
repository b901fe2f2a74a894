"""Literal counts in a body are found, divided and proved; what can't be divided is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tests.compiler.toys import ATTENTION, HIDDEN, Attention, Block, codes, compiled, traced
from tpplan.compiler.check.attribute_reads import attributes_read
from tpplan.compiler.ir.program import LocalAttribute


def local(program: tpplan.Program) -> dict[str, tuple[LocalAttribute, ...]]:
    return {module.name: module.local_attributes for module in program.modules if module.local_attributes}


def in_blocks(rules: dict[str, Any], name: str = "*.body") -> dict[str, Any]:
    return {f"{name}.{pattern}": style for pattern, style in rules.items()}


def test_a_head_count_becomes_local() -> None:
    assert local(compiled(Attention(), ATTENTION)) == {"": (LocalAttribute("num_heads", 4, 2),)}


def test_equal_modules_all_get_theirs() -> None:
    model = nn.Sequential(*(Block(Attention()) for _ in range(3)))
    found = local(compiled(model, in_blocks(ATTENTION)))
    assert found == {f"{i}.body": (LocalAttribute("num_heads", 4, 2),) for i in range(3)}


def test_an_attribute_of_the_same_size_that_counts_something_else_stays() -> None:
    class Misleading(Attention):
        """head_dim equals num_heads, and comes first."""

        def __init__(self) -> None:
            super().__init__(num_heads=4)
            self.first = 4

    assert HIDDEN == 16
    assert local(compiled(Misleading(), ATTENTION)) == {"": (LocalAttribute("num_heads", 4, 2),)}


def test_two_attributes_that_must_change_together_do() -> None:
    class SizeAndHeads(Attention):
        """As GPT-2: it merges heads by the width that it remembers."""

        def __init__(self) -> None:
            super().__init__()
            self.embed_dim = HIDDEN

        def forward(self, x: Tensor) -> Tensor:
            batch, sequence, _ = x.shape
            shape = (batch, sequence, self.num_heads, self.head_dim)
            q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v)
            return self.o(mixed.transpose(1, 2).reshape(batch, sequence, self.embed_dim))

    (held,) = local(compiled(SizeAndHeads(), ATTENTION)).values()
    assert {(a.name, a.local) for a in held} == {("num_heads", 2), ("embed_dim", 8)}


def test_a_wrong_factor_of_the_right_product_is_given_up() -> None:
    """With as many heads as entries in a head, half of the one is half of the other, until they are told apart."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim, self.num_heads, self.keys, self.values = 4, 4, 4, 4
            self.qkv, self.o = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            batch, sequence, _ = x.shape
            packed, start, parts = self.qkv(x), 0, list[Tensor]()
            for count in (self.num_heads, self.keys, self.values):
                parts.append(packed[..., start : start + count * self.head_dim])
                start += count * self.head_dim
            parts.append(packed[..., start:])
            q, k, v, gate = (part.view(batch, sequence, -1, self.head_dim).transpose(1, 2) for part in parts)
            v = v * gate
            return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, sequence, -1))

    rules = {"qkv": {"style": "colwise", "packed": ["q", "k", "v", "gate"]}, "o": "rowwise"}
    (held,) = local(compiled(Square(), rules)).values()
    assert {(a.name, a.local) for a in held} == {("num_heads", 2), ("keys", 2), ("values", 2)}


def test_heads_in_groups_of_which_a_product_counts_all() -> None:
    class Grouped(nn.Module):
        """The features of a group are 2 · heads // groups times the size; the size equals the heads."""

        def __init__(self) -> None:
            super().__init__()
            self.heads, self.groups, self.size, self.width = 8, 4, 8, 64
            self.up, self.down = nn.Linear(HIDDEN, 2 * 64), nn.Linear(64, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            batch, sequence, _ = x.shape
            each = self.size * self.heads // self.groups
            one, two = self.up(x).view(batch, sequence, self.groups, 2 * each).split([each, each], -1)
            one = one.reshape(batch, sequence, self.heads, self.size).softmax(-1)
            return self.down(one.reshape(batch, sequence, self.width) * two.reshape(batch, sequence, -1))

    (held,) = local(compiled(Grouped(), {"up": "colwise", "down": "rowwise"})).values()
    assert {(a.name, a.local) for a in held} == {("heads", 4), ("groups", 2), ("width", 32)}


def test_a_wrong_count_that_shows_in_a_caller_first_is_not_taken() -> None:
    class Blocks(nn.Module):
        """As CodeGen: the code itself says that features lie in four blocks, so that no attribute can be right."""

        def __init__(self) -> None:
            super().__init__()
            self.heads, self.size = 8, 8
            self.qkv, self.o = nn.Linear(HIDDEN, 3 * 64), nn.Linear(64, HIDDEN)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            batch, sequence, _ = x.shape
            parts = self.qkv(x).reshape(batch, sequence, 4, -1).split(self.size * self.heads // 4, -1)
            q, k, v = (part.reshape(batch, sequence, -1, self.size).transpose(1, 2) for part in parts)
            weights = (q @ k.transpose(-1, -2)).softmax(-1)
            mixed = (weights @ v).transpose(1, 2).contiguous()
            return self.o(mixed.view(batch, sequence, self.heads * self.size)), weights

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Blocks()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mixed, weights = self.body(x)
            return x + mixed, weights

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(x)[0]

    program = compiled(First(), {"outer.body.qkv": "colwise", "outer.body.o": "rowwise"})
    assert [module.name for module in program.modules if module.recorded is not None] == ["outer.body"]
    assert not local(program)


def test_what_the_code_reads_is_seen_through_another_name() -> None:
    class Settings:
        def __init__(self) -> None:
            self.size, self.unread, self.heads = 1, 2, 4

        def __getattr__(self, name: str) -> Any:
            return self.heads if name == "n_head" else object.__getattribute__(self, name)

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings, self.other, self.width = Settings(), 5, HIDDEN

        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, self.width).view(-1, self.settings.n_head, self.width // self.settings.n_head)

    model = nn.Sequential(Held())
    trace = traced(model, torch.randn(2, HIDDEN))
    assert attributes_read(model, trace, (torch.randn(2, HIDDEN),), {}, "0") == {"width", "settings.heads"}
    assert type(model[0]) is Held
    assert type(model[0].settings) is Settings


def test_a_plan_may_name_the_attribute() -> None:
    model = nn.Sequential(Block(Attention()))
    plan = {**in_blocks(ATTENTION), "*.body": {"style": "replicate", "local": ["num_heads"]}}
    assert local(compiled(model, plan)) == {"0.body": (LocalAttribute("num_heads", 4, 2),)}


def test_an_attribute_named_for_one_layer_is_not_taken_for_granted_in_the_next() -> None:
    model = nn.Sequential(*(Block(Attention()) for _ in range(3)))
    plan = {**in_blocks(ATTENTION), "0.body": {"style": "replicate", "local": ["num_heads"]}}
    assert local(compiled(model, plan)).keys() == {"0.body", "1.body", "2.body"}


@pytest.mark.parametrize("names", [["nothing"], ["head_dims"]])
def test_a_name_that_is_no_integer_attribute_is_a_finding(names: list[str]) -> None:
    model = nn.Sequential(Block(Attention()))
    with pytest.raises(tpplan.CompileError) as raised:
        compiled(model, {**in_blocks(ATTENTION), "*.body": {"style": "replicate", "local": names}})
    assert codes(raised.value) == ["TP135"]
    assert "num_heads" in str(raised.value)


def test_heads_that_the_axis_does_not_divide_are_refused() -> None:
    """8 features split over 4 ranks are 2 a rank, but 2 heads aren't."""

    class TwoHeads(Attention):
        def __init__(self) -> None:
            super().__init__(num_heads=2)

    with pytest.raises(tpplan.CompileError) as raised:
        compiled(
            TwoHeads(), {**{k: {"style": "colwise", "output": "shard"} for k in ("q", "k", "v")}, "o": "rowwise"}, tp=4
        )
    assert set(codes(raised.value)) & {"TP103", "TP107"}


def test_a_count_that_a_replicated_value_is_viewed_by_too_is_not_made_local() -> None:
    class Both(Attention):
        """The result would have its old shape back, with features shuffled."""

        def forward(self, x: Tensor) -> Tensor:
            batch, sequence, _ = x.shape
            q = self.q(x).view(batch, sequence, self.num_heads, self.head_dim).softmax(-1)
            shuffled = x.view(batch, sequence, self.num_heads, -1).transpose(2, 3).reshape(batch, sequence, -1)
            return self.o(q.flatten(2)) + shuffled

    try:
        program = compiled(Both(), {"q": "colwise", "o": "rowwise"})
    except tpplan.CompileError as error:
        assert codes(error)[0] == "TP107"
    else:
        assert not local(program)


def test_a_literal_without_an_attribute_gathers_or_is_refused() -> None:
    class Literal(Attention):
        def forward(self, x: Tensor) -> Tensor:
            batch, sequence, _ = x.shape
            return self.o(self.q(x).view(batch, sequence, 4, 4).softmax(-1).flatten(2))

    program = compiled(Literal(), {"q": "colwise", "o": "rowwise"})
    assert not local(program)
    assert [d.code for d in program.diagnostics] == ["TP104", "TP105"]


def test_a_count_of_heads_in_front_of_a_norm_of_queries_becomes_local() -> None:
    """All before the norm is a view, so that the norm is the first to see a wrong shape; the body has the count."""

    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm, self.k_norm = nn.LayerNorm(HIDDEN // 4), nn.LayerNorm(HIDDEN // 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            size = k.shape[-1] // self.num_heads
            q, k, v = (t.view(x.shape[0], -1, self.num_heads, size).transpose(1, 2) for t in (q, k, v))
            mixed = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
            return self.o(mixed.transpose(1, 2).reshape(x.shape[0], -1, self.num_heads * size))

    model = nn.Sequential(*(Block(Normed()) for _ in range(2)))
    found = local(compiled(model, in_blocks(ATTENTION)))
    assert found == {f"{i}.body": (LocalAttribute("num_heads", 4, 2),) for i in range(2)}

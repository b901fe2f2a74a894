"""Operators with rules in models: equal to the stock ones, with the collectives of what torch's own would take."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.ops.operators import Attention, Between, attention, define, with_backward
from tests.runtime.simulated import worst
from tests.runtime.test_owner import difference
from tests.runtime.world import Member, world
from tpplan.compiler.ir.layout import sharded
from tpplan.compiler.ir.region import LocalValue, OperationNode
from tpplan.compiler.ir.trace import Reference
from tpplan.compiler.rules.users_operators import declared_layouts
from tpplan.plan.operator_rule import read_rule

HEADS: dict[str, Any] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
PAIR: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
TOLERANCE = 1e-12  # of float64, relative

attend = define(
    "attend",
    "(Tensor q, Tensor k, Tensor v, bool causal=False) -> Tensor",
    attention,
    fake=lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)
with_backward(attend, attention, 3)
tpplan.register_operator(attend, "b (k g) s! d!, b k t! d!, b k t! d! -> b (k g) s! d!")


def scale(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.tanh()


scaled = define("scaled", "(Tensor x, Tensor weight) -> Tensor", scale)
with_backward(scaled, scale, 2)
tpplan.register_operator("tests::scaled", "... f, f -> ... f")


def mean_scale(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight)


normed = define("normed", "(Tensor x, Tensor weight) -> Tensor", mean_scale)
with_backward(normed, mean_scale, 2)
tpplan.register_operator("tests::normed", "... f!, f! -> ... f!")


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


projected = define("projected", "(Tensor x, Tensor weight) -> Tensor", product)
with_backward(projected, product, 2)
tpplan.register_operator("tests::projected", "... i+, o i+ -> ... o")


class Projects(nn.Module):
    """A row whose product is an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), Row(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Row(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tests.projected(x, self.weight)


SCALED = {**PAIR, "scale": "colwise"}


def attend_flat(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    q, k, v = (held.unflatten(-1, (num_heads, -1)).transpose(1, 2) for held in (q, k, v))
    return attention(q, k, v).transpose(1, 2).flatten(2)


flat = define("flat", "(Tensor q, Tensor k, Tensor v, int num_heads) -> Tensor", attend_flat)
with_backward(flat, attend_flat, 3)
tpplan.register_operator(flat, "b s! (h d!), b t! (h d!), b t! (h d!) -> b s! (h d!)", sizes={"num_heads": "h"})


class Flat(nn.Module):
    """Heads that an operator counts by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(a, b) for a, b in ((16, 32), (16, 32), (16, 32), (32, 16)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(torch.ops.tests.flat(self.q(x), self.k(x), self.v(x), self.num_heads))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 3 * x**2 * weight * gradients[0], (gradients[0] * x**3).flatten(0, -2).sum(0)


class Hidden(torch.autograd.Function):
    """One that can't run without numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert x.data_ptr()
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(numpy.tanh(x.detach().numpy())) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        made = torch.from_numpy(numpy.tanh(x.detach().numpy()))
        return (1 - made**2) * weight * gradients[0], (gradients[0] * made).flatten(0, -2).sum(0)


tpplan.register_operator(Cube, "... f, f -> ... f")
tpplan.register_operator(Hidden, "... f, f -> ... f")


@tpplan.operator("b (k g) s! d!, b k t! d!, b k t! d! -> b (k g) s! d!")
def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    assert q.data_ptr(), "it can't run without numbers"
    return attention(q, k, v, causal)


@tpplan.operator("... i+, o i+ -> ... o")
def multiply(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class Multiplies(nn.Module):
    """Layers that aren't called: a function multiplies by their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(multiply(x, self.up.weight).relu(), self.down.weight)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[int], dict[str, int]]] = {
    "heads": (lambda: Attention(attend), HEADS, [2, 4], {"all-reduce": 1}),
    "fewer keys": (lambda: Attention(attend, 8, 4), HEADS, [2, 4], {"all-reduce": 1}),
    "shared keys": (lambda: Attention(attend, 8, 2), HEADS, [4], {"all-reduce": 2}),
    "a single key": (lambda: Attention(attend, 6, 1), HEADS, [2, 3, 6], {"all-reduce": 2}),
    "a product": (Projects, {"up": "colwise", "down.weight": "rowwise"}, [2, 3], {"all-reduce": 1}),
    "products of a function": (Multiplies, PAIR, [2, 3], {"all-reduce": 1}),
    "features": (lambda: Between(torch.ops.tests.scaled), SCALED, [2, 4], {"all-reduce": 1}),
    "heads by a number": (Flat, HEADS, [2], {"all-reduce": 1}),
    "a norm of all": (lambda: Between(torch.ops.tests.normed), PAIR, [2], {"all-gather": 2, "all-reduce": 1}),
    "an autograd function": (lambda: Between(lambda *held: Cube.apply(*held)), SCALED, [2, 5], {"all-reduce": 1}),
    "without meta": (lambda: Between(lambda *held: Hidden.apply(*held)), SCALED, [2], {"all-reduce": 1}),
    "a function of heads": (lambda: Attention(flash), HEADS, [2, 3, 4], {"all-reduce": 1}),
    "keys that ranks share": (lambda: Attention(flash, 8, 2), HEADS, [4], {"all-reduce": 2}),  # and their gradients
    "one key": (lambda: Attention(flash, 6, 1), HEADS, [2, 3, 6], {"all-reduce": 2}),
    "causal": (lambda: Attention(functools.partial(flash, causal=True), 8, 4), HEADS, [2, 4], {"all-reduce": 1}),
}


def call(batch: int, length: int) -> Any:
    return (torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length)).double(),), {}


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name, case in CASES.items() for tp in case[2]])
def test_parts_are_computed_by_the_rule(name: str, tp: int) -> None:
    torch.manual_seed(0)
    make, rules, _, collectives = CASES[name]
    model = make().double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, tp, call(2, 6)[0])
    assert program.count_collectives() == collectives and not program.assumed
    assert max(worst(model, rules, tp, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE


@pytest.mark.processes
def test_the_same_on_real_processes() -> None:
    for made in world(2).run(on_processes):
        assert max(made[:2]) < TOLERANCE and made[2] == 1


def on_processes(member: Member) -> list[float]:
    torch.manual_seed(0)
    stock = Attention(flash).double()
    (x,), _ = call(2, 6)
    model = tpplan.parallelize(copy.deepcopy(stock), {"version": 1, "modules": HEADS}, member.mesh(), inputs=(x,))
    with CommDebugMode() as communicated:
        ours = model(x)
    theirs = stock(x)
    for result in (ours, theirs):
        result.square().sum().backward()
    pairs: list[Any] = [*zip(model.parameters(), stock.parameters(), strict=True)]
    gradients = max(difference(own.grad, other.grad) for own, other in pairs)
    return [difference(ours, theirs), gradients, communicated.get_total_counts()]


class Recomputed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        made: Any = checkpoint(super().forward, x, use_reentrant=False)
        return made


def recomputed_at_other_sizes(member: Member) -> list[float]:
    """What a function is to captures is no part of the model's state, which a recomputed part is held against."""
    torch.manual_seed(0)
    stock = Recomputed(flash).double()
    rules = {"version": 1, "modules": HEADS}
    model = tpplan.parallelize(copy.deepcopy(stock), rules, member.mesh(), inputs=call(2, 6)[0])
    errors: list[float] = []
    for x in (call(2, 6)[0][0], call(3, 9)[0][0]):
        results = [held(x) for held in (model, stock)]
        for result in results:
            result.square().sum().backward()
        gradients = [[p.grad for p in held.parameters()] for held in (model, stock)]
        errors.append(max(difference(*results), difference(*gradients)))
    return errors


@pytest.mark.processes
def test_recomputed_parts_may_have_functions_with_rules() -> None:
    for errors in world(2).run(recomputed_at_other_sizes):
        assert max(errors) < TOLERANCE


UNTRUE = {
    "b h s! d, b h t! d, b h t! d -> b h s! d": "`d` can't be split: the parts' results differ",
    "b h s! d!, b h t+ d!, b h t+ d! -> b h s! d!": "`t` can't be summed over parts: the parts' results differ",
    "b h s d!, b h s d!, b h s d! -> b h s d!": "`s` can't be split: the parts' results differ",
}


@pytest.mark.parametrize("rule", UNTRUE)
def test_a_rule_that_isnt_true_names_its_dim(rule: str) -> None:
    model = Attention(tpplan.operator(rule)(attention))
    with pytest.raises(tpplan.OperatorRuleError) as caught:
        tpplan.compile_plan(model, {"version": 1, "modules": HEADS}, 2, (torch.zeros(2, 6, 16),))
    (finding,) = caught.value.diagnostics
    assert finding.code == "TP151" and UNTRUE[rule] in finding.message


def normed_by_features(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight)


def by_size(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight if x.shape[-1] < 20 else normed_by_features(x, weight)


HIDDEN: dict[str, tuple[Any, torch.dtype]] = {
    "in bfloat16": (lambda x, w: x * w + x.mean(-1, keepdim=True), torch.bfloat16),
    "small numbers": (lambda x, w: 1e-5 * (x * w + x.mean(-1, keepdim=True)), torch.float32),
    "without a gradient": (lambda x, w: normed_by_features(x, w).detach(), torch.float32),
    "by its size": (by_size, torch.float32),
    "far away": (lambda x, w: x * w + functional.pad(x, (9, 0))[..., :-9], torch.float32),
    "written": (lambda x, w: x.mul_(w), torch.float32),
    "another dtype": (lambda x, w: (x * w).int(), torch.float32),
    "two results": (lambda x, w: (x * w, x), torch.float32),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_no_trial_lets_it_pass(name: str) -> None:
    function, dtype = HIDDEN[name]
    model = Between(tpplan.operator("... f, f -> ... f")(function)).to(dtype)
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP151|TP022"):
        tpplan.compile_plan(model, {"version": 1, "modules": SCALED}, 2, (torch.zeros(2, 6, 16, dtype=dtype),))


def test_other_dtypes_are_fine() -> None:
    def widened(x: Tensor, weight: Tensor) -> Tensor:
        return (x.float() * weight.float()).to(x.dtype)

    model = Between(tpplan.operator("... f, f -> ... f")(widened)).bfloat16()
    rules = {"version": 1, "modules": SCALED}
    program = tpplan.compile_plan(model, rules, 2, (torch.zeros(2, 6, 16, dtype=torch.bfloat16),))
    assert program.count_collectives() == {"all-reduce": 1} and not program.assumed


def test_numbers_choose() -> None:
    rule = tpplan.operator("b s f, b s -> b s f")
    chosen = rule(lambda x, ids: torch.where((ids > 1)[..., None], x - x.mean(-1, keepdim=True), x))

    class Chooses(Between):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(chosen(self.up(x), (x[..., 0] * 0).long()))

    with pytest.raises(tpplan.OperatorRuleError, match=r"TP151.*`f` can't be split"):
        tpplan.compile_plan(Chooses(None), {"version": 1, "modules": PAIR}, 2, (torch.zeros(2, 6, 16),))


class Chain(nn.Module):
    """A function of a row's sum, before that has to be made."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(16, 24), nn.Linear(24, 16, bias=False), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(functional.linear(self.up(x), self.down.weight))


LINEAR: dict[str, tuple[str, Any, str]] = {
    "relu": ("(Tensor x) -> Tensor", lambda x: x.relu(), "... -> ..."),
    "twice": ("(Tensor x) -> Tensor", lambda x: 2 * x, "... -> ..."),
}


@pytest.mark.parametrize("name", LINEAR)
def test_sums_pass_through_what_is_linear_alone(name: str) -> None:
    schema, function, rule = LINEAR[name]
    made = define(f"sums_{name}", schema, function)
    tpplan.register_operator(made, rule, linear=("x",))
    model = Chain(made).requires_grad_(False)
    rules = {"version": 1, "modules": {"up": "colwise", "down.weight": "rowwise"}}
    if name == "twice":
        assert tpplan.compile_plan(model, rules, 2, (torch.zeros(2, 6, 16),)).count_collectives() == {"all-reduce": 1}
        return
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP151.*a sum can't pass through `x`"):
        tpplan.compile_plan(model, rules, 2, (torch.zeros(2, 6, 16),))


def test_what_a_function_holds_is_refused() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(()))

        def method(self, x: Tensor) -> Tensor:
            return x * self.a

    owner, held = Owner(), torch.ones(3)
    for function in (owner.method, owner, functools.partial(owner.method), lambda x: x * held):
        with pytest.raises(tpplan.OperatorRuleError, match=r"TP022.*a function with a rule holds a"):
            tpplan.operator("... -> ...")(function)
    rules: list[Any] = [None, 3, b"a -> a", "[a], [b] -> a", "a -> [a]"]
    for rule in rules:
        with pytest.raises(tpplan.OperatorRuleError, match="TP022"):
            tpplan.operator(rule)


def test_a_function_that_writes_to_its_argument_raises_when_it_runs() -> None:
    function = tpplan.operator("... -> ...")(lambda x: x.mul_(2))
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP022.*writes to an argument"):
        function(torch.ones(3))


class Parent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class Child(Parent):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 100


def test_a_class_that_derives_from_one_with_a_rule_has_none() -> None:
    one: Any = torch.ones(())
    tpplan.register_operator(Parent, "... -> ...")
    assert Child.apply(one) == 100 and Parent.apply(one) == 2
    tpplan.register_operator(Child, "... -> ...")
    assert Child.apply(one) == 100 and Parent.apply(one) == 2


def test_gradients_are_tried_as_well() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            made = gradients[0] * weight
            return made - made.mean(-1, keepdim=True), (gradients[0] * x).flatten(0, -2).sum(0)

    tpplan.register_operator(Wrong, "... f, f -> ... f")
    with pytest.raises(
        tpplan.OperatorRuleError, match=r"TP151.*`f` can't be split: the parts' gradients for `tensors`"
    ):
        compiled(lambda *held: Wrong.apply(*held))


def compiled(function: Any, **plan: Any) -> tpplan.Program:
    return tpplan.compile_plan(
        Between(function), {"version": 1, "modules": SCALED, **plan}, 2, (torch.zeros(2, 6, 16),)
    )


@tpplan.operator("b h s! d!, b h t! d!, b h t! d!, _ -> b h s! d!")
def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, mask)


def test_an_argument_may_be_none() -> None:
    mask = torch.zeros(6, 6).double()
    for function in (masked, lambda q, k, v: masked(q, k, v, mask=mask)):
        model = Attention(function).double()
        assert max(worst(model, HEADS, 2, call(2, 6), [call(2, 6), call(3, 6)])) < TOLERANCE
    with pytest.raises(tpplan.CompileError, match=r"TP110.*`masked` is called with 2 tensors, and its rule has terms"):
        compiled(lambda x, weight: masked(x, weight, None))


@tpplan.operator("[... f], f -> ... f")
def summed(held: list[Tensor], weight: Tensor) -> Tensor:
    return torch.stack(held).sum(0) * weight


@tpplan.operator("[... f, ... f], f -> ... f")
def subtracted(held: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    return (held[0] - held[1]) * weight


def test_tensors_may_come_in_lists() -> None:
    for function in (
        lambda x, weight: summed([x, x.tanh(), x * 2], weight),
        lambda x, weight: subtracted((x, x.tanh()), weight=weight),
    ):
        model = Between(function).double()
        program = tpplan.compile_plan(model, {"version": 1, "modules": SCALED}, 2, call(2, 6)[0])
        assert program.count_collectives() == {"all-reduce": 1} and not program.assumed
        assert max(worst(model, SCALED, 2, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE
    with pytest.raises(tpplan.CompileError, match=r"TP110.*is called with 4 tensors, and its rule has terms for 3"):
        compiled(lambda x, weight: subtracted((x, x, x), weight))


def test_a_method_of_a_module_has_no_rule() -> None:
    class Own(nn.Module):
        @tpplan.operator("... f, f -> ... f")
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

    with pytest.raises(tpplan.TpplanError, match=r"TP022.*the method `forward` of a module has a rule"):
        Own()(torch.ones(2), torch.ones(2))


def test_what_cant_be_tried_is_assumed() -> None:
    program = compiled(tpplan.operator("... f, f -> ... f", audit=False)(scale))
    assert program.assumed and "audit=False" in program.assumed[0]

    @tpplan.operator("... f, f -> ... f")
    def absent(x: Tensor, weight: Tensor) -> Tensor:
        raise RuntimeError("no GPU here")

    (assumed,) = compiled(absent).assumed
    assert "... f, f -> ... f (it can't run on cpu here (no GPU here))" in assumed
    assert tpplan.Program.from_dict(compiled(absent).to_dict()).assumed == (assumed,)


def test_a_plan_may_have_rules() -> None:
    unknown = define("unknown", "(Tensor x, Tensor weight) -> Tensor", scale)
    with_backward(unknown, scale, 2)
    given = re.escape('`tpplan.register_operator("tests::unknown", "<x>, <weight> -> <result>")`')
    with pytest.raises(tpplan.CompileError, match=rf"TP127.*an operator that has no rule\n.*{given}"):
        compiled(unknown)
    (gathered,) = [held for held in compiled(unknown, modules=PAIR).diagnostics if held.code == "TP104"]
    assert re.search(given, gathered.notes[0])
    program = compiled(unknown, operators={"tests::unknown": "... f, f -> ... f"})
    assert program.count_collectives() == {"all-reduce": 1}
    with pytest.raises(tpplan.CompileError, match="TP127"):
        compiled(unknown)
    text = 'version: 1\nmodules: {up: colwise}\noperators:\n  "my::attn": "b h -> b q"\n'
    with pytest.raises(tpplan.PlanError) as caught:
        tpplan.load_plan(text)
    assert str(caught.value.diagnostics[0].span).endswith(":4:25")
    assert tpplan.load_plan(text.replace("q", "h!")).operators[0].rule.whole == {"h"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["heads", "a function of heads", "features", "heads by a number"])
def test_suggestions_see_through_operators(name: str) -> None:
    make, rules, *_ = CASES[name]
    model = make()
    plan = tpplan.suggest_plan(model, 2, inputs=call(2, 6)[0][0].float())
    program = tpplan.compile_plan(model, plan, 2, call(2, 6)[0][0].float())
    assert program.count_collectives() == {"all-reduce": 1}
    ours = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, call(2, 6)[0][0].float())
    assert [p.layout for p in program.parameters] == [p.layout for p in ours.parameters]


def test_a_function_may_be_declared_in_a_forward() -> None:
    program = tpplan.compile_plan(
        Between(lambda x, weight: tpplan.operator("... -> ...")(torch.tanh)(x) * weight),
        {"version": 1, "modules": SCALED}, 2, (torch.zeros(2, 6, 16),),
    )  # fmt: skip
    assert program.count_collectives() == {"all-reduce": 1}


def test_what_is_needed_whole_is_never_split() -> None:
    with pytest.raises(tpplan.CompileError, match="needs all of `f` by its rule, which is split"):
        compiled(torch.ops.tests.normed)


def test_a_rule_of_a_plan_for_no_operator_is_told() -> None:
    program = compiled(torch.ops.tests.scaled, operators={"tests::scald": "... f, f -> ... f"})
    (finding,) = program.diagnostics
    assert finding.code == "TP022" and finding.severity == "warning"
    assert "`tests::scald`" in finding.message and finding.help == "did you mean `tests::scaled`?"


class Looks(nn.Module):
    """A function whose first tensor has whole numbers, on values that are whole on each rank."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.table, self.function = nn.Linear(16, 16), nn.Parameter(torch.rand(8, 16)), function
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = self.function((x[..., 0] * 0).long(), self.table, self.first(x))
        return self.down(self.up(made).relu())


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_what_a_function_makes_is_tried_on_whole_values_as_well(dtype: torch.dtype | None) -> None:
    rule = tpplan.operator("b s, v! e!, b s f -> b s f", dtype=dtype)
    model = Looks(rule(lambda ids, table, x: x * functional.embedding(ids, table).mean(-1, keepdim=True))).double()
    if dtype is not None:
        assert max(worst(model, PAIR, 2, call(2, 6), [call(2, 6)])) < TOLERANCE
        return
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP151.*where a capture takes it for torch.int64"):
        tpplan.compile_plan(model, {"version": 1, "modules": PAIR}, 2, call(2, 6)[0])


def test_long_sequences_take_no_time() -> None:
    layouts = declared_layouts(*long_attention(1 << 20))
    assert layouts == (sharded(1),)


def long_attention(length: int) -> Any:
    shape = (1, 8, length, 4)
    values = [LocalValue(shape, (0, 0, 0, 0), torch.float32, True) for _ in range(4)]
    arguments = tuple(map(Reference, range(3)))
    node = OperationNode(torch.ops.tests.attend.default, arguments, (), (0, 1, 2), (3,), (), None)
    rule = read_rule("b (k g) s! d!, b k t! d!, b k t! d! -> b (k g) s! d!")
    return rule, node, values, dict.fromkeys(range(3), sharded(1)), 8


def test_a_rule_has_to_fit_its_operator() -> None:
    define("written", "(Tensor(a!) x) -> Tensor", lambda x: x, fake=lambda x: x)
    wrong = {
        "tests::written": ("b -> b", "writes to `x`, and no rule tells"),
        "tests::scaled": ("b, b, b -> b", r"has 2 tensor arguments, and the rule terms for 3"),
        "tests::attend": ("b, b, b -> b, b", "returns 1 tensors, and the rule has terms for 2"),
    }
    for name, (rule, message) in wrong.items():
        with pytest.raises(tpplan.OperatorRuleError, match=f"TP022.*{message}"):
            tpplan.register_operator(name, rule)
    with pytest.raises(tpplan.OperatorRuleError, match=r"TP022.*is no operator of torch.library"):
        tpplan.register_operator("attn", "b -> b")

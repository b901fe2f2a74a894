"""Reshards between the operations of a body: one softmax over all experts, a mix of heads, a norm over all of them."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.runtime.simulated import first_tensor, on_ranks, worst
from tests.runtime.world import Member, world
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import Program
from tpplan.parity.verification import verify_program
from tpplan.plan import CompileError, Pattern, Style
from tpplan.report.program_page import render_program
from tpplan.report.program_why import render_why
from tpplan.runtime.ranks.communicator import ProcessGroupCommunicator
from tpplan.suggest import search
from tpplan.suggest.weigh import exchanges_little

WIDTH, HEADS, EXPERTS, INNER = 24, 4, 8, 12
PARTS = {"*.w": "colwise", "*.up": "rowwise"}
RULES = {"*.{q,k,v}": "colwise", "*.out": "rowwise"}


class Chooser(nn.Module):
    """Weights of all experts, by a softmax over columns."""

    rules: ClassVar = PARTS

    def __init__(self) -> None:
        super().__init__()
        self.w, self.up = nn.Parameter(torch.randn(WIDTH, EXPERTS)), nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).softmax(-1) @ self.up


class Experts(nn.Module):
    """Each expert's features are split; the choice among them is made of all scores."""

    rules: ClassVar = {"*.{w,first}": "colwise", "*.second": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, EXPERTS))
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 5)
        self.second = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = (flat @ self.w).softmax(-1)
        made = torch.bmm(torch.bmm(flat.expand(EXPERTS, -1, -1), self.first).relu(), self.second)
        return (made * weights.T[..., None]).sum(0).view_as(x)


class Routed(Experts):
    """Each token is for two experts."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = (flat @ self.w).softmax(-1).topk(2, -1)
        weights = torch.zeros(len(flat), EXPERTS, dtype=x.dtype).scatter(-1, chosen.indices, chosen.values)
        made = torch.bmm(torch.bmm(flat.expand(EXPERTS, -1, -1), self.first).relu(), self.second)
        return torch.einsum("etd,te->td", made, weights).view_as(x)


class Twice(Chooser):
    """The scores are read whole by two operations, and as they lie by a third."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.w
        return (scores.softmax(-1) + scores.sort(-1).values.sigmoid() * scores.tanh()) @ self.up


class Returned(Chooser):
    """The scores leave the body, too, as do those that are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = x @ self.w
        weights = scores.softmax(-1) * self.scale
        return weights @ self.up, scores, weights


class Passed(Chooser):
    """The whole is passed to a module inside, and to a layer that is split."""

    rules: ClassVar = {"*.w": "colwise", "*.wide": "colwise", "*.up": "rowwise"}

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.w, self.up = nn.Parameter(torch.randn(WIDTH, EXPERTS)), nn.Linear(INNER, WIDTH)
        self.norm, self.wide = nn.LayerNorm(EXPERTS), nn.Linear(EXPERTS, INNER)

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.w).softmax(-1)
        return self.up(self.wide(self.norm(weights)).relu() * weights.max(-1, keepdim=True).values)


class Written(Chooser):
    """What was gathered is written to before it is gathered again."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.w).sin()
        first = scores.softmax(-1)
        scores.mul_(2)
        return (first + scores.softmax(-1)) @ self.up


class WrittenThrough(nn.Module):
    """A whole value is split like columns, written to through a view of it, and split again."""

    rules: ClassVar = PARTS

    def __init__(self) -> None:
        super().__init__()
        self.w, self.up = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        whole = x.sin()
        first = x @ self.w + whole
        whole.view(-1).mul_(2)
        return (first * whole).tanh() @ self.up


class Dropped(Chooser):
    """With dropout before and after."""

    def forward(self, x: Tensor) -> Tensor:
        scores = nn.functional.dropout(x @ self.w, 0.0, self.training)
        return nn.functional.dropout(scores.softmax(-1), 0.0, self.training) @ self.up


class Talking(nn.Module):
    """Heads whose scores are mixed, before and after the softmax."""

    rules: ClassVar = RULES
    before = after = True

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix, self.other = nn.Parameter(torch.randn(HEADS, HEADS)), nn.Parameter(torch.randn(HEADS, HEADS))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2
        if self.before:
            scores = torch.einsum("bhij,hk->bkij", scores, self.mix)
        weights = scores.softmax(-1)
        if self.after:
            weights = torch.einsum("bhij,hk->bkij", weights, self.other)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Mixed(Talking):
    after = False


class Summed(nn.Module):
    """A norm of all heads' features, by sums."""

    rules: ClassVar = {"*.w": "colwise", "*.up": "rowwise", "*.scale": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.w, self.up = nn.Parameter(torch.randn(WIDTH, INNER)), nn.Parameter(torch.randn(INNER, WIDTH))
        self.scale = nn.Parameter(torch.randn(INNER))

    def normed(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).rsqrt() * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x @ self.w).relu() @ self.up


class Averaged(Summed):
    def normed(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.scale


class AllAveraged(Summed):
    """By the mean of everything, of the batch as well; and by one that nobody scales."""

    def normed(self, x: Tensor) -> Tensor:
        return (x * (x.pow(2).mean() + 1e-5).rsqrt() + x.mean(2).exp()[..., None]) * self.scale


class Heads(Summed):
    """All heads have one norm, without a weight."""

    rules: ClassVar = PARTS

    def normed(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        return (heads / (heads.pow(2).mean((1, -1), keepdim=True) + 1e-5).sqrt()).transpose(1, 2).flatten(2)


class Queries(Talking):
    """A norm of all heads' queries, between layers that a plan splits."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        q = q / (q.pow(2).mean((1, 3), keepdim=True) + 1e-5).sqrt()
        return self.out(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Shared(nn.Module):
    """One body, called for values of two sizes; one of them twice."""

    rules: ClassVar = PARTS

    def __init__(self) -> None:
        super().__init__()
        self.first = Chooser()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.first(x[:, :4]).mean(1, keepdim=True) + self.first(x.flip(1))


KINDS = (
    Chooser, Experts, Routed, Twice, Returned, Passed, Written, WrittenThrough, Dropped,
    Talking, Mixed, Summed, Averaged, AllAveraged, Heads,
)  # fmt: skip


class Net(nn.Module):
    """Two of them, with a norm before the first."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), kind(), kind()

    def forward(self, x: Tensor) -> Any:
        made, *others = _flat(self.first(self.norm(x)))
        x = x + made
        made, *more = _flat(self.second(x))
        return (x + made, *others, *more) if others else x + made


def _flat(held: Any) -> tuple[Tensor, ...]:
    return held if isinstance(held, tuple) else (held,)


def x_of(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return (Shared() if kind is Shared else Net(kind)).double()


def plan_of(kind: Any) -> dict[str, Any]:
    return {"version": 1, "modules": kind.rules}


def compiled(kind: Any, tp: int = 2, length: int = 8) -> Program:
    return tpplan.compile_plan(made(kind), plan_of(kind), tp, (x_of(length),))


def moves(program: Program) -> list[tuple[str, Collective, Collective]]:
    """What the first of the two bodies exchanges inside."""
    inner = next(module.inner for module in program.modules if module.name == "first")
    return [(str(move.path[0]), move.forward, move.backward) for move in inner if move.forward.communicates]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_exchange_what_they_need(kind: Any, tp: int) -> None:
    report = tpplan.verify(made(kind), plan_of(kind), tp, (x_of(8),))
    assert report.ok, report.problems
    program = compiled(kind, tp)
    body = next(module.recorded for module in program.modules if module.name == "first")
    assert body is not None and body.moves
    told = [finding.message for finding in program.diagnostics if finding.code == "TP147"]
    expected = "`first` exchanges values between its operations"
    assert [message.partition(":")[0] for message in told] == ([expected] if moves(program) else [])


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_other_sizes_are_right(kind: Any) -> None:
    example, *calls = [((x_of(*sizes),), {}) for sizes in ((8,), (8,), (5, 3), (1, 1), (12, 4))]
    quiet = [lambda model: model.eval(), calls[1], lambda model: model.train(), calls[2]]
    assert max(worst(made(kind), kind.rules, 2, example, [*calls, *quiet])) < 1e-12


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_without_gradients_are_right(kind: Any) -> None:
    x, other = x_of(8).detach(), x_of(5, 3).detach()
    stock = made(kind)

    def work(model: nn.Module, _: object) -> list[Tensor]:
        with torch.no_grad():
            return [first_tensor(model(held)) for held in (x, other, x)]

    expected = work(stock, None)
    for found in on_ranks(stock, kind.rules, 2, ((x_of(8),), {}), work):
        for mine, its in zip(expected, found, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Chooser, Twice, Averaged, AllAveraged])
def test_a_rank_may_have_nothing_of_it(kind: Any) -> None:
    report = tpplan.verify(made(kind), plan_of(kind), 5, (x_of(8),))
    assert report.ok, report.problems


@pytest.mark.parametrize("kind", [Chooser, Averaged, Talking])
def test_beside_a_split_sequence(kind: Any) -> None:
    plan = {"version": 1, "modules": {**kind.rules, "norm": "sequence"}}
    report = tpplan.verify(made(kind), plan, 2, (x_of(8),))
    assert report.ok, report.problems


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.first, self.norm(x), use_reentrant=False)
        return x + self.second(x)


@pytest.mark.parametrize("kind", [Chooser, Averaged])
def test_what_is_exchanged_is_exchanged_again_when_recomputed(kind: Any) -> None:
    torch.manual_seed(0)
    report = tpplan.verify(Recomputed(kind).double(), plan_of(kind), 2, (x_of(8),))
    assert report.ok, report.problems


def test_what_costs_least_is_exchanged() -> None:
    gather, scatter, reduce = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
    assert moves(compiled(Chooser)) == [("softmax", gather, scatter)]
    assert moves(compiled(Summed)) == [("add", reduce, reduce)]  # of a number for each token, not of all features
    assert moves(compiled(Averaged)) == [("add", reduce, reduce)]
    assert len(moves(compiled(Twice))) == 1  # what two operations read is gathered once
    assert len(moves(compiled(Written))) == 2  # but not if it is written to in between


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(5)
def test_counted_as_predicted(kind: Any) -> None:
    program = compiled(kind)
    counted: list[int] = []
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = tpplan.parallelize(made(kind), plan_of(kind), mesh, (x_of(8),))
        for _ in range(2):
            with CommDebugMode() as mode:
                result = sharded(x_of(8))
                counted.append(mode.get_total_counts())
                torch.stack([tensor.sum() for tensor in _flat(result)]).sum().backward()
            counted.append(mode.get_total_counts())
    whole, forward = (sum(program.count_collectives(backward=way).values()) for way in (True, False))
    assert counted == [forward, whole] * 2


@pytest.mark.parametrize("kind", [Chooser, AllAveraged, Passed])
def test_a_program_survives_json(kind: Any) -> None:
    program = compiled(kind)
    again = Program.from_dict(program.to_dict())
    assert again.digest == program.digest
    assert [module.recorded for module in again.modules] == [module.recorded for module in program.modules]


def test_attention_gathers_where_it_is_cheaper_than_at_a_boundary() -> None:
    """Of scores, whose number grows with the square of the length, or of queries, keys and values."""
    assert moves(compiled(Talking))
    long = compiled(Talking, length=4096)
    assert not moves(long) and {"TP104"} <= {finding.code for finding in long.diagnostics}
    assert not moves(compiled(Queries))  # a few numbers are gathered as soon as summed
    reduce = Collective.ALL_REDUCE
    assert moves(compiled(Queries, length=32768)) == [("add", reduce, reduce)]


class Scaled(nn.Module):
    """A norm of all heads' queries with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(1024, 1024, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        q, k, v = (held.view(*x.shape[:2], 16, -1).transpose(1, 2) for held in (q, self.k(x), self.v(x)))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("split", [False, True])
def test_no_weight_is_gathered(split: bool) -> None:
    """Though it may be less than what is made by it."""
    with torch.device("meta"):
        model, x = nn.Sequential(Scaled()), torch.empty(2, 8192, 1024, requires_grad=True)
    rules = RULES | ({"*.scale": "colwise"} if split else {})
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 4, (x,))
    assert [module.name for module in program.modules if module.inner] == (["0"] if split else [])
    assert {module.name for module in program.modules if module.recorded} == {"0"}


def test_explain_shows_what_is_exchanged_and_where() -> None:
    program = compiled(Summed)
    assert "mid P → R·∂P      all-reduce 128 B      all-reduce 128 B" in render_program(program)
    why = render_why(program, Pattern.parse("first"))
    line = inspect.getsourcelines(Summed.normed)[1] + 1
    assert "mid  add.0.0 (2, 8, 1) float64  P → R·∂P: forward all-reduce 128 B, backward all-reduce 128 B" in why
    assert f"`aten.add.Tensor` at parity/test_gathers.py:{line} can't run on what a rank has of it" in why


class Shares(nn.Module):
    """Features that are scaled by their share in the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).square()
        return x + self.down(hidden / (1 + hidden.mean(-1, keepdim=True)))


class Weighing(nn.Module):
    """Attention that hands out the mean of its heads' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=20, vdim=12, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x[..., :20], x[..., 4:16])


@pytest.mark.parametrize(("kind", "inside"), [(Shares, True), (Weighing, False)])
def test_suggested_plans_exchange_what_is_small_where_nothing_is_split_otherwise(
    kind: type[nn.Module], inside: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind()).double(), x_of(8)
    many = torch.randn(8, 8192, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    found = search(copy.deepcopy(model).to("meta"), 2, (many,), {}, False)  # to gather features of few is quicker
    assert any(module.recorded and module.recorded.moves for module in found.program.modules) is inside
    assert {held.style for held in found.settings.values()} == {Style.COLWISE, Style.ROWWISE}
    report = verify_program(model, found.program, ((x,), {}))
    assert report.ok and report.collectives == report.predicted


def test_suggested_plans_exchange_nothing_inside_that_is_large_or_needless(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanges_little(compiled(Summed)) and not exchanges_little(compiled(Experts))
    searching = importlib.import_module("tpplan.suggest.settings")
    monkeypatch.setattr(searching, "exchanges_little", lambda _: False)  # pyright: ignore
    many = torch.randn(8, 8192, WIDTH, device="meta", requires_grad=True)
    with pytest.raises(CompileError, match="TP123"):
        search(nn.Sequential(Shares()).to("meta"), 2, (many,), {}, False)
    found = search(made(Talking), 2, (x_of(8),), {}, False)
    assert not any(module.recorded and module.recorded.moves for module in found.program.modules)


class Sliced(Chooser):
    """Scores that the plan splits by mistake: halves of one projection."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = (x @ self.w).chunk(2, -1)
        return torch.cat([one.softmax(-1), other.softmax(-1)], -1) @ self.up


def test_no_gather_covers_a_plan_that_is_wrong() -> None:
    with pytest.raises(CompileError):
        compiled(Sliced)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_body_that_is_called_several_times(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tpplan.verify(made(Shared), plan_of(Shared), tp, (x_of(8),))
    assert report.ok, report.problems
    counted: Counter[str] = Counter()  # torch's own counter knows no module that is called twice

    def counting(name: str, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            counted[name.replace("_", "-")] += 1
            return stock(*args)

        return run

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        stock = getattr(ProcessGroupCommunicator, name)
        monkeypatch.setattr(ProcessGroupCommunicator, name, counting(name, stock))
    with fake_process_group(tp):
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        sharded = tpplan.parallelize(made(Shared), plan_of(Shared), mesh, (x_of(8),))
        sharded(x_of(8)).sum().backward()
    assert counted == compiled(Shared, tp).count_collectives()


class Box:
    """No container."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Boxed(Chooser):
    """A record can't pass on the object, so the body's own code has to run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Unboxed()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.inner(Box(x))


class Unboxed(nn.Module):
    def forward(self, box: Any) -> Tensor:
        return box.held.mean()


def test_a_body_that_has_no_record_is_refused_for_its_operation() -> None:
    with pytest.raises(CompileError, match=r"aten\._softmax.default needs values that other ranks hold"):
        compiled(Boxed)


def _trained(member: Member, watched: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(3)
        model, x = made(kind), x_of(8)
        if member.size > 1:
            with pytest.MonkeyPatch.context() as patch:
                if watched:  # the ranks then compare each collective, and count them
                    patch.setenv("TPPLAN_DEBUG", "1")
                model = tpplan.parallelize(model, plan_of(kind), member.mesh(), (x,))
        with torch.no_grad():
            found[f"{kind.__name__} quiet"] = {"result": first_tensor(model(x))}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            first_tensor(model(x)).square().mean().backward()
            optimizer.step()
        found[kind.__name__] = {
            n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()
        } | {"x": x.grad}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "watched"), [(2, False), (2, True), (4, False)])
def test_trainings_on_processes(tp: int, watched: bool) -> None:
    (expected,) = world(1).run(_trained, False)
    for found in world(tp).run(_trained, watched):
        for kind, weights in expected.items():
            for name, weight in weights.items():
                torch.testing.assert_close(found[kind][name], weight, rtol=1e-8, atol=1e-8, msg=f"{kind} {name}")


def _compiled_by_torch(member: Member) -> tuple[Tensor, Tensor | None]:
    model, x = made(Chooser), x_of(8)
    if member.size > 1:
        model = tpplan.parallelize(model, plan_of(Chooser), member.mesh(), (x,))
        model(x).sum().backward()
        model = torch.compile(model, backend="aot_eager")
        x.grad = None
    result = model(x)
    result.sum().backward()
    return result.detach(), x.grad


@pytest.mark.slow
def test_compiled_by_torch() -> None:
    (expected,) = world(1).run(_compiled_by_torch)
    for found in world(2).run(_compiled_by_torch):
        for mine, its in zip(expected, found, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9)

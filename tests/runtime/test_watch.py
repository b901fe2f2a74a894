"""Watched calls: what a capture can't see shows in the path that a real call takes, before a result leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.compiler.toys import HIDDEN, MLP, plan_of
from tests.runtime.simulated import on_ranks, watched, worst
from tests.runtime.world import Member, world
from tpplan.calls.call_errors import UnprovedCallError
from tpplan.calls.guard import CallGuard
from tpplan.calls.watch import Watch

TOLERANCE = 1e-12
WIDTH = 24


class Body(nn.Module):
    """A column, what `between` makes of it, and a row."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x), x))


def longer(h: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(h, -1) if x.shape[1] > 12 else h.relu()


def longer_alike(h: Tensor, x: Tensor) -> Tensor:
    return h.tanh() if x.shape[1] > 12 else h.relu()


def padded(h: Tensor, x: Tensor) -> Tensor:
    if x.shape[1] < 12:
        h = torch.cat([h, h.new_zeros(h.shape[0], 12 - h.shape[1], h.shape[2])], 1)
    return (h - h.mean(1, keepdim=True))[:, : x.shape[1]]


def single(h: Tensor, x: Tensor) -> Tensor:
    return h / h.norm(dim=-1, keepdim=True) if x.shape[0] == 1 else h


def large(h: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(h, -1) if x.abs().max() > 100 else h.relu()


def large_by_item(h: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(h, -1) if (x.abs() > 100).any().item() else h.relu()


def large_by_entry(h: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(h, -1) if True in (x.abs() > 100) else h.relu()


def large_where_some_are_found(h: Tensor, x: Tensor) -> Tensor:
    """Of what is done with the entries found, each call does another number, and steps aren't compared."""
    found = (x > 1).nonzero().sum() * 0
    return (torch.softmax(h, -1) if x.abs().max() > 100 else h.relu()) + found


def large_alike(h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if x.abs().max() > 100 else h


def x(batch: int = 3, length: int = 12, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=generator)
    return made.mul_(scale).requires_grad_()


def body(between: Callable[[Tensor, Tensor], Tensor]) -> Body:
    torch.manual_seed(0)
    return Body(between).double()


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("between", "sizes"),
    [
        (longer, [(3, 12), (3, 20), (3, 12), (3, 20), (2, 30)]),
        (longer_alike, [(3, 12), (3, 20), (3, 5)]),
        (padded, [(3, 12), (3, 7), (3, 12), (3, 7)]),
        (single, [(3, 12), (1, 12), (2, 12), (1, 5)]),
    ],
)
@pytest.mark.one_in(6)
def test_a_branch_on_a_size_is_proved_at_the_size(between: Any, sizes: list[tuple[int, int]], tp: int) -> None:
    calls = [((x(*size),), {}) for size in sizes]
    assert max(worst(body(between), MLP, tp, ((x(),), {}), calls)) < TOLERANCE


class Counts(Body):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(longer)
        self.calls, self.log = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x.shape[1])
        self.calls += 1
        return super().forward(x)


def test_what_counts_its_calls_is_not_run_again() -> None:
    def work(own: Any, _: CallGuard) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        for length in (12, 20, 20, 20):
            with contextlib.suppress(UnprovedCallError):
                own(x(3, length))
                seen.append((own.calls, len(own.log)))
        return seen

    assert on_ranks(Counts().double(), MLP, 2, ((x(),), {}), work) == [[(1, 1), (2, 2), (3, 3), (4, 4)]] * 2


class Store:
    """What a caller passes to be written to."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.calls = 0
        self.log: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}


class Stores(Body):
    """Leaves its input with the caller, and takes a side by its numbers."""

    def forward(self, x: Tensor, store: Store) -> Tensor:
        store.calls += 1
        store.log.append(x)
        store.by_name[f"{store.calls}"] = x
        store.last = x
        return super().forward(x)


class Fills(Stores):
    """Writes to a tensor of the caller's, too."""

    def forward(self, x: Tensor, store: Store) -> Tensor:
        assert store.last is not None
        with torch.no_grad():
            store.last += 1
        return super().forward(x, store)


def test_a_call_that_is_run_again_leaves_its_callers_objects_as_one_run_does() -> None:
    def work(own: Any, _: CallGuard) -> list[Any]:
        store = Store()
        given = [x(scale=scale) for scale in (1.0, 1000.0, 1.0)]
        made = [own(held, store) for held in given]
        with torch.no_grad():
            assert all(torch.allclose(ours, stock(held, Store())) for ours, held in zip(made, given, strict=True))
        assert [*store.by_name] == ["1", "2", "3"] and all(map(torch.equal, store.log, given))
        return [store.calls, len(store.log), store.last is store.log[-1]]

    stock = Stores(large).double()
    assert on_ranks(stock, MLP, 2, ((x(), Store()), {}), work) == [[3, 3, True]] * 2


def test_a_call_that_wrote_to_its_callers_tensors_is_not_run_again() -> None:
    def work(own: Any, _: CallGuard) -> tuple[int, float]:
        store = Store()
        store.last = torch.zeros(1)
        with pytest.raises(UnprovedCallError, match="TP131"):
            own(x(scale=1000.0), store)
        held = store.log[0] if store.log else None
        return store.calls, -1.0 if held is None else float(held.detach().abs().max() > 100)

    example = Store()
    example.last = torch.zeros(1)
    assert on_ranks(Fills(large).double(), MLP, 2, ((x(), example), {}), work) == [(1, 1.0)] * 2


class Cache:
    """Of a user's, that grows or counts."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None
        self.count = 10


class Steered(Stores):
    """Takes another path when its cache has counted four calls."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        h = self.up(x)
        if cache.kept is None:
            cache.kept = torch.zeros_like(h)
        cache.kept.copy_(h.detach())
        cache.count += 1
        return self.down(torch.softmax(h, -1) if cache.count > 13 else h.relu())


class Grows(Stores):
    """Takes another path when its cache has grown to four inputs."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        h = self.up(x)
        cache.kept = h.detach() if cache.kept is None else torch.cat([cache.kept, h.detach()], 1)
        return self.down(torch.softmax(h, -1) if cache.kept.shape[1] > 3 * x.shape[1] else h.relu())


class Along(Stores):
    """Normalises along the dim that its cache names."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return self.down(torch.softmax(self.up(x) * cache.kept, cache.count))


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_a_dim_that_a_callers_object_names_beside_tensors_is_proved_by_itself(dim: int) -> None:
    caches = [Cache(), Cache()]
    for cache, count in zip(caches, (1, dim), strict=True):
        cache.kept, cache.count = torch.ones(1, dtype=torch.float64), count
    first, second = (((x(), cache), {}) for cache in caches)
    assert max(worst(Along(longer).double(), MLP, 2, first, [first, second])) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "condition"), [(Steered, "`cache.count <= 12`"), (Grows, "cache.kept.shape[1] <= 2*x.shape[1]`")]
)
def test_what_a_cache_counts_or_how_far_it_has_grown_may_steer_the_path(kind: type[Stores], condition: str) -> None:
    stock = kind(longer).double()

    def work(own: Any, _: CallGuard) -> list[bool]:
        ours, theirs = Cache(), Cache()
        for _step in range(3):
            assert torch.allclose(own(x(), ours), stock(x(), theirs))
        for _step in range(2):  # a softmax over split features isn't proved beside what the cache holds
            with pytest.raises(UnprovedCallError) as raised:
                own(x(), ours)
            assert condition in str(raised.value)
        return [True]

    assert on_ranks(stock, MLP, 2, ((x(), Cache()), {}), work) == [[True]] * 2


@pytest.mark.parametrize("between", [large, large_by_item, large_by_entry, large_where_some_are_found, large_alike])
@pytest.mark.one_in(3)
def test_both_sides_of_a_branch_on_numbers_run_by_their_own_programs(between: Any) -> None:
    calls = [((x(scale=scale),), {}) for scale in (1.0, 1000.0, 1.0, 1.0, 1000.0)]
    assert max(worst(body(between), MLP, 2, ((x(),), {}), calls)) < TOLERANCE


def test_a_side_that_both_programs_cover_is_watched_no_longer() -> None:
    def work(own: nn.Module, guard: CallGuard) -> list[bool]:
        return watched(own, guard, x)

    assert on_ranks(body(large_alike), MLP, 2, ((x(),), {}), work) == [[True, False, False]] * 2


def test_a_side_that_needs_another_program_is_watched_at_every_call() -> None:
    def work(own: nn.Module, guard: CallGuard) -> list[bool]:
        return watched(own, guard, x)

    assert on_ranks(body(large), MLP, 2, ((x(),), {}), work) == [[True, True, True]] * 2


def mixed(length: int, scales: tuple[float, float]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    made = x(2, length).detach() * torch.tensor(scales, dtype=torch.float64)[:, None, None]
    return (made.requires_grad_(),), {}


class Blocks(nn.Module):
    """Two branches on numbers, alike on both sides, and behind them one on a size, which isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        for part in x.unbind(0):
            if part.abs().max() > 100:
                h = h * 2
        if x.shape[1] > 12:
            h = torch.softmax(h, -1)
        return self.down(h)


@pytest.mark.parametrize("first", [1.0, 1000.0])
@pytest.mark.parametrize("second", [1.0, 1000.0])
@pytest.mark.one_in(3)
def test_a_branch_that_may_go_either_way_hides_no_other(first: float, second: float) -> None:
    torch.manual_seed(0)
    example = mixed(12, (1.0, 1.0))
    scales = [(1.0, 1.0), (first, second), (second, first)]
    calls = [mixed(length, pair) for length in (12, 10, 20, 12, 22) for pair in scales]
    assert max(worst(Blocks().double(), MLP, 2, example, calls)) < TOLERANCE


class Interplay(nn.Module):
    """Two branches, of which neither alone needs another program, and both together do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        scale = h.sum(-1, keepdim=True) if x[0].abs().max() > 100 else torch.ones_like(h[..., :1])
        return self.down(h * scale if x[1].abs().max() > 100 else h)


def test_sides_of_two_branches_are_proved_together() -> None:
    torch.manual_seed(0)
    pairs = [(1.0, 1.0), (1000.0, 1.0), (1.0, 1000.0), (1.0, 1.0), (1000.0, 1000.0), (1.0, 1.0), (1000.0, 1000.0)]
    assert max(worst(Interplay().double(), MLP, 2, mixed(12, (1.0, 1.0)), [mixed(12, p) for p in pairs])) < 1e-9


def test_a_call_in_inference_mode_runs_again_by_the_program_of_its_side() -> None:
    stock = body(large_by_entry)

    def work(own: nn.Module, _: Any) -> list[float]:
        with torch.inference_mode():  # whose tensors count no writes
            arguments = [x(scale=scale).detach().clone() for scale in (1e4, 1.0, 1e4)]
            before = [argument.clone() for argument in arguments]
            found = [difference(stock, own, argument) for argument in arguments]
            assert all(map(torch.equal, arguments, before))
        return found

    for found in on_ranks(stock, MLP, 2, ((x(),), {}), work):
        assert max(found) < TOLERANCE


class Overwrites(Body):
    """Doubles its argument where that lies, and goes by what it was."""

    def forward(self, x: Tensor) -> Tensor:
        large = bool(x.abs().max() > 100)
        x.mul_(2)
        h = self.up(x)
        return self.down(torch.softmax(h, -1) if large else h.relu())


@pytest.mark.slow
def test_an_argument_that_a_call_overwrites_in_inference_mode_is_put_back_before_it_runs_again() -> None:
    torch.manual_seed(0)
    stock = Overwrites(large).double()

    def work(own: nn.Module, _: Any) -> list[float]:
        with torch.inference_mode():
            pairs = [(x(scale=s).detach().clone(), x(scale=s).detach().clone()) for s in (1e4, 1.0, 1e4)]
            found = [float((own(mine) - stock(its)).abs().max()) for mine, its in pairs]
            return [*found, *(float((mine - its).abs().max()) for mine, its in pairs)]

    for found in on_ranks(stock, MLP, 2, ((x().detach(),), {}), work):
        assert max(found) < TOLERANCE


def by_setting(h: Tensor, x: Tensor) -> Tensor:
    return torch.softmax(h, -1) if os.environ.get("TPPLAN_TEST_WIDE") else h.relu()


def by_rank(h: Tensor, x: Tensor) -> Tensor:
    return h.relu() if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0 else h.relu().relu()


def changed_settings(member: Member) -> list[float]:
    """How far calls are from the stock model's: the first two with a setting that the example didn't have."""
    stock, model = body(by_setting), body(by_setting)
    tpplan.parallelize(model, plan_of(MLP), member.mesh(), (x().detach(),))
    found: list[float] = []
    os.environ["TPPLAN_TEST_WIDE"] = "1"
    try:
        for length in (12, 14):
            found.append(difference(stock, model, x(3, length)))
    finally:
        del os.environ["TPPLAN_TEST_WIDE"]
    return [*found, difference(stock, model, x(3, 16))]


def difference(stock: nn.Module, model: nn.Module, argument: Tensor) -> float:
    return (stock(argument) - model(argument)).abs().max().item()


def other_ranks(member: Member) -> str:
    model = body(by_rank)
    try:
        tpplan.parallelize(model, plan_of(MLP), member.mesh(), (x().detach(),))
    except tpplan.TpplanError as error:
        return str(error)
    return error_of(model, x())


def error_of(model: nn.Module, *arguments: Tensor) -> str:
    try:
        model(*arguments)
    except tpplan.TpplanError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_setting_changed_since_the_proof_is_seen_at_the_first_call_of_a_size() -> None:
    for differences in world(2).run(changed_settings):
        assert max(differences) < TOLERANCE  # each is proved as it is met, and run by its own program


@pytest.mark.processes
def test_a_path_that_one_rank_alone_takes_is_refused_on_every_rank() -> None:
    for text in world(2).run(other_ranks):
        assert text.startswith("TP116"), text


class Asks(Body):
    """A body that asks for something of its modules, which rewritten ones may answer otherwise."""

    def __init__(self, ask: Callable[[Any], object]) -> None:
        super().__init__(longer)
        self.ask, self.norm = ask, nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * (0.5 if self.ask(self) else 1.0))


class AsksForAPath(Asks):
    """The same, which calls something else."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h.relu() if self.ask(self) else torch.softmax(h, -1))


class AsksForAResult(Asks):
    """The same, which returns what it was told."""

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).relu()), {"told": bool(self.ask(self))}


SEEN: dict[str, Callable[[Any], object]] = {
    "class of a layer": lambda own: type(own.up) is nn.Linear,
    "class of a layer without a rule": lambda own: type(own.norm) is nn.LayerNorm,
    "text of that class": lambda own: "LayerNorm" in {kind.__name__ for kind in type(own.norm).__mro__[1:]},
    "class of the model": lambda own: type(own) in (Asks, AsksForAPath, AsksForAResult),
    "forward of a class": lambda own: type(own.down).forward is nn.Linear.forward,
    "class of a parameter": lambda own: type(own.up.weight) is nn.Parameter,
    "text": lambda own: "Linear(in_features" in repr(own) and "Colwise" not in repr(own),
}
LOOKED: dict[str, Callable[[Any], object]] = {
    "length": lambda own: len(vars(own.up)) > 19,
    "length of one without a rule": lambda own: len(own.norm.__dict__) > 17,
    "names": lambda own: any(name.startswith("_tp") for name in vars(own.up)),
    "list of names": lambda own: len(dir(own.up)) % 2,
    "copy": lambda own: len({**vars(own)}) % 2,
    "tensor": lambda own: "weight" in vars(own.up),
    "forward": lambda own: vars(own.up).get("forward") is None,
}
SAME: dict[str, Callable[[Any], object]] = {
    "class": lambda own: isinstance(own.up, nn.Linear) and isinstance(own.up.weight, nn.Parameter),
    "name of a class": lambda own: type(own.up).__name__ == "Linear" and type(own).__name__.startswith("Asks"),
    "own attribute": lambda own: vars(own.up)["out_features"] == WIDTH and "style" not in vars(own.up),
    "attribute": lambda own: own.up.out_features == WIDTH and not hasattr(own.up, "style"),
}


@pytest.mark.parametrize("kind", [Asks, AsksForAPath, AsksForAResult])
@pytest.mark.parametrize("ask", SEEN)
def test_what_a_body_can_tell_of_the_rewrite_is_refused(ask: str, kind: type[Asks]) -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP139.*(test_watch.py:\d+ |it returns ).*where the stock model"):
        tpplan.compile_plan(kind(SEEN[ask]).double(), plan_of(MLP), 2, (x().detach(),))


@pytest.mark.parametrize("ask", LOOKED)
def test_what_a_body_sees_in_a_modules_dict_is_refused(ask: str) -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP110(.|\n)*a module's `__dict__`.*\n(.|\n)*test_watch.py:\d+"):
        tpplan.compile_plan(Asks(LOOKED[ask]).double(), plan_of(MLP), 2, (x().detach(),))


class Residual(nn.Module):
    """A block whose forwards have other names for it than `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(block, x: Tensor) -> Tensor:  # pyright: ignore[reportSelfClsParameterName]
        return x + block.down(block.up(x).relu())


class AnyArguments(Residual):
    def forward(*passed: Any) -> Tensor:
        block, x = passed
        return x * 2 + block.down(block.up(x).relu())


def scaled(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) * layer.out_features


class ByFunction(Residual):
    def forward(block, x: Tensor) -> Tensor:  # pyright: ignore[reportSelfClsParameterName]
        return x + scaled(block.down, block.up(x).relu())


@pytest.mark.parametrize("kind", [Residual, AnyArguments, ByFunction])
def test_steps_tell_their_module_whatever_it_is_called(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind().double())
    with Watch({id(module): name for name, module in model.named_modules()}) as watch:
        model(x())
    assert [step.module for step in watch.steps if step.name in ("relu", "add")] == ["0", "0"]


@pytest.mark.parametrize("kind", [Residual, AnyArguments, ByFunction])
def test_a_body_may_call_its_module_as_it_likes(kind: type[nn.Module]) -> None:
    plan = {"0.up": "colwise", "0.down": "rowwise"}
    calls = [((x(),), {}), ((torch.randn(2, 12, HIDDEN, dtype=torch.float64),), {})]
    assert max(worst(nn.Sequential(kind()).double(), plan, 2, ((x(),), {}), calls)) < TOLERANCE


class AsksLater(Asks):
    """The same, in calls with a flag."""

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        return super().forward(x) if late else self.down(self.up(x).relu())


def test_what_a_body_can_tell_is_refused_in_later_kinds_of_calls() -> None:
    def work(own: nn.Module, _: CallGuard) -> str:
        assert not error_of(own, x())
        try:
            own(x(), late=True)
        except tpplan.TpplanError as error:
            return str(error)
        return ""

    for text in on_ranks(AsksLater(SEEN["class of a layer"]).double(), MLP, 2, ((x(),), {}), work):
        assert text.startswith("TP117") and "TP139 seen-rewrite" in text


@pytest.mark.parametrize("kind", [Asks, AsksForAPath])
@pytest.mark.parametrize("ask", SAME)
def test_rewritten_modules_answer_as_stock_ones(ask: str, kind: type[Asks]) -> None:
    torch.manual_seed(0)
    assert max(worst(kind(SAME[ask]).double(), MLP, 2, ((x(),), {}), [((x(),), {})] * 2)) < TOLERANCE


class Looks(nn.Module):
    """A forward that looks up its own parameters, which it finds as DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        state = dict(self.named_parameters())
        h = nn.functional.linear(x, state["up.weight"], state["up.bias"])
        return nn.functional.linear(h.relu(), state["down.weight"], state["down.bias"])


def test_what_a_lowered_model_cannot_run_is_told_when_it_is_compiled() -> None:
    with pytest.raises(tpplan.CompileError, match="TP136"):
        tpplan.compile_plan(Looks().double(), plan_of(MLP), 2, (x().detach(),))


class Penalised(Body):
    """Adds the squares of some parameters, each of them read by its name or as one of all."""

    def __init__(self, by_name: bool) -> None:
        super().__init__(longer)
        self.norm, self.by_name = nn.LayerNorm(HIDDEN), by_name

    def forward(self, x: Tensor) -> Tensor:
        held = [self.norm.weight] if self.by_name else [p for n, p in self.named_parameters() if n == "norm.weight"]
        return self.down(self.up(self.norm(x)) + sum(p.square().mean() for p in held))


@pytest.mark.parametrize("rules", [MLP, MLP | {"norm": "sequence"}])
def test_a_parameter_is_not_read_past_the_sum_of_its_gradient(rules: dict[str, Any]) -> None:
    with pytest.raises(tpplan.CompileError, match=r"TP136.*`norm.weight` itself, where nobody sums(.|\n)*by its name"):
        tpplan.compile_plan(Penalised(False).double(), plan_of(rules), 2, (x().detach(),))
    torch.manual_seed(0)
    calls = [((x(scale=scale).detach(),), {}) for scale in (1.0, 2.0)]
    assert max(worst(Penalised(True).double(), rules, 2, calls[0], calls)) < TOLERANCE


class Ponders(Body):
    """Adds up results until enough has come together, which is nothing at first."""

    def forward(self, x: Tensor) -> Tensor:
        weight, total, count = torch.zeros(x.shape[:2], dtype=x.dtype), torch.zeros_like(x), 0
        while count < 4 and bool((weight < 0.9).any()):
            made = self.down(self.up(x).relu())
            share = torch.minimum(made.mean(-1).sigmoid(), 1 - weight)
            weight, total, x, count = weight + share, total + share.unsqueeze(-1) * made, x + made, count + 1
        return total


def test_a_loop_whose_first_test_is_of_constants_is_followed() -> None:
    torch.manual_seed(0)
    calls = [((x(scale=scale),), {}) for scale in (1.0, 1.0, 100.0, 0.01)]
    assert max(worst(Ponders(large).double(), MLP, 2, ((x(),), {}), calls)) < TOLERANCE

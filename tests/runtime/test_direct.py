"""Calls that record no gradient run by forwards that ask nothing, and leave no trace of these in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

import tpplan
from tests.runtime.simulated import on_ranks
from tests.runtime.world import Member, world
from tpplan.compat.dynamo import COMPILED_CALL
from tpplan.compat.propagator import fake_mesh
from tpplan.runtime.modules import direct
from tpplan.runtime.modules.direct import Direct
from tpplan.runtime.modules.module_runtime import RUNTIME

RULES = {
    "table": "vocab",
    "blocks.*.norm": "sequence",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": {"style": "colwise", "output": "replicate"},
}
PLAIN = RULES | {"blocks.*.norm": "replicate"}
IDS = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """A block whose body may do what bodies do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A table, two blocks and a head."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([self.block() for _ in range(2)])
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Steep(Block):
    """One that asks for the slope of its layer, in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.down(torch.relu(self.up(self.norm(y)))).square().sum(), y)
        return x - 0.1 * slope


class SteepModel(Model):
    """A model of such blocks."""

    block = Steep


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[Direct]:
    """The forwards that were put in place, once for each call."""
    found: list[Direct] = []
    put = Direct.put

    def noted(self: Direct) -> None:
        found.append(self)
        put(self)

    monkeypatch.setattr(direct.Direct, "put", noted)
    return found


def stock(kind: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().eval()


def ways(model: nn.Module) -> set[tuple[str, str]]:
    """What instances hold that gives way to what is put in place."""
    names = ("forward", COMPILED_CALL, "weight", "bias")
    held = ((at, name, vars(module)) for at, module in model.named_modules() for name in names)
    return {(at, name) for at, name, own in held if own.get(name) is not None}


@pytest.mark.parametrize("rules", [RULES, PLAIN])
@pytest.mark.parametrize("kind", [Model, SteepModel])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.one_in(5)
def test_a_call_without_gradients_gives_what_the_stock_model_gives(
    kind: type[Model], rules: dict[str, Any], tp: int, uses: list[Direct]
) -> None:
    model = stock(kind)
    with torch.no_grad():
        expected = model(IDS)

    def work(own: nn.Module, _: object) -> Tensor:
        before = ways(own)
        with torch.no_grad():
            own(IDS)
            made = own(IDS)
        assert ways(own) == before
        trained = own(IDS)  # nothing of it is left for a call with gradients
        assert trained.requires_grad
        torch.testing.assert_close(trained.detach(), made)
        return made

    for made in on_ranks(model, rules, tp, ((IDS,), {}), work):
        torch.testing.assert_close(made, expected)
    assert len(uses) == tp


def test_modules_are_as_they_were_after_a_call_that_raised() -> None:
    class Failing(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            if type(self).fails:
                raise ValueError("no")
            return made

    class FailingModel(Model):
        block = Failing

    def work(own: nn.Module, _: object) -> None:
        before = ways(own)
        with torch.no_grad():
            own(IDS)
            own(IDS)
            own.blocks[1].register_forward_hook(lambda *_: None)  # pyright: ignore
            own(IDS)
            for wrong in (IDS + 20, IDS - 32):
                with pytest.raises(IndexError):
                    own(wrong)  # on each rank, whoever would hold the row
            for _ in range(2):
                torch.testing.assert_close(own(IDS.int()), expected)
        assert ways(own) == before and not own.__dict__[RUNTIME].direct.in_place
        with torch.no_grad():
            torch.testing.assert_close(own(IDS), expected)

    model = stock(FailingModel)
    expected = model(IDS).detach()
    on_ranks(model, PLAIN, 2, ((IDS,), {}), work)


def drawn(member: Member) -> list[Tensor]:
    """What a model makes of one seed whose blocks alone are in training: watched, with gradients, and without."""
    own: Any = tpplan.parallelize(stock(), {"version": 1, "modules": RULES}, member.mesh(), (IDS,)).eval()
    own.blocks.train()
    found: list[Tensor] = []
    for recorded in (False, True, False, False):
        torch.manual_seed(5)
        with torch.set_grad_enabled(recorded):
            found.append(own(IDS).detach())
    return found


@pytest.mark.processes
def test_random_numbers_of_a_part_in_training_are_drawn_as_ever() -> None:
    one, other = world(2).run(drawn)
    for held in (*one, *other):
        torch.testing.assert_close(held, one[0])


class Hooking(Block):
    """One that registers a hook on its layer in the forward, and counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        def count(*_: object) -> None:
            Hooking.calls += 1

        handle = self.up.register_forward_hook(count)
        made = super().forward(x)
        handle.remove()
        return made


class HookingModel(Model):
    """A model of such blocks."""

    block = Hooking


def test_hooks_are_called_that_are_there_or_that_a_forward_registers(uses: list[Direct]) -> None:
    def work(own: nn.Module, _: object) -> tuple[int, int, int]:
        seen: list[int] = []
        with torch.no_grad():
            own(IDS)
            before = len(uses)
            handle = own.blocks[0].down.register_forward_hook(lambda *_: seen.append(1))  # pyright: ignore
            for _ in range(3):
                own(IDS)
            handle.remove()
            Hooking.calls = 0
            for _ in range(3):
                own(IDS)
        return len(seen), Hooking.calls, len(uses) - before

    ((seen, calls, direct),) = on_ranks(stock(HookingModel), PLAIN, 1, ((IDS,), {}), work)
    assert direct >= 3 and seen == 3 and calls == 6


def test_a_replaced_forward_is_called(uses: list[Direct]) -> None:
    model = stock()

    def work(own: nn.Module, _: object) -> int:
        calls: list[int] = []
        with torch.no_grad():
            own(IDS)
            own(IDS)
            up: Any = own.blocks[0].up  # pyright: ignore
            forward = up.forward
            up.forward = lambda *args: (calls.append(1), forward(*args))[1]
            own(IDS)
            own(IDS)
        return len(calls)

    assert on_ranks(model, PLAIN, 2, ((IDS,), {}), work) == [2, 2] and uses


class Two(Model):
    """A model with a table and a layer that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.other_table, self.other_head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor, other: bool = False) -> Tensor:
        return self.other_head(self.other_table(ids)) if other else super().forward(ids)


def test_layers_that_a_program_does_not_call_are_left_alone() -> None:
    model = stock(Two)
    rules = PLAIN | {"other_table": "vocab"}
    with torch.no_grad():
        expected = [model(IDS, other) for other in (False, True)]

    def work(own: nn.Module, _: object) -> list[Tensor]:
        with torch.no_grad():
            return [own(IDS, other) for other in (False, True) * 3]

    for found in on_ranks(model, rules, 2, ((IDS,), {}), work):
        for one, other in zip(found, expected * 3, strict=True):
            torch.testing.assert_close(one, other)


class Scale(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.randn(16)), offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain + self.offset) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Scaled(Model):
    """A model with such norms."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.norm = Scale(float(number))


@pytest.mark.parametrize("rules", [RULES, PLAIN])
def test_a_norm_is_one_operation(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    fused = torch.rms_norm

    def counted(x: Tensor, *args: Any) -> Tensor:
        calls.append(x)
        return fused(x, *args)

    monkeypatch.setattr(torch, "rms_norm", counted)
    torch.manual_seed(0)
    model = Scaled().eval()

    def work(own: Any, _: object) -> list[Tensor]:
        found: list[Tensor] = []
        with torch.no_grad():
            for dtype in (torch.float32, torch.float64):
                own.to(dtype)
                found += [own(IDS), own(IDS)]
            own.float().blocks[0].norm.offset = 1.0
            found += [own(IDS), own(IDS)]
        return [*found, own(IDS).detach()]

    with torch.no_grad():
        expected = [model(IDS), model.double()(IDS)]
        model.float().blocks[0].norm.offset = 1.0  # pyright: ignore
        expected.append(model(IDS))
        model.blocks[0].norm.offset = 0.0  # pyright: ignore
    for found in on_ranks(model, rules, 2, ((IDS,), {}), work):
        for made, one in zip(found, [e for e in expected for _ in range(2)] + expected[-1:], strict=True):
            torch.testing.assert_close(made, one)
    assert len(calls) == 2 * 2 * 2 and {x.dtype for x in calls} == {torch.float32}


def test_rules_are_asked_under_a_default_device() -> None:
    fake_mesh.cache_clear()
    with torch.device("meta"):
        assert fake_mesh(3).size() == 3


class Doubled(Block):
    """One that calls its norm with other parameters, between two calls with its own."""

    def forward(self, x: Tensor) -> Tensor:
        called = functional_call(self.norm, {"weight": self.norm.weight * 2}, (self.norm(x),))
        return x + self.down(torch.relu(self.up(called + self.norm(x))))


class DoubledColumn(Block):
    """One that calls a split layer so."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional_call(self.up, {"bias": self.up.bias + 1}, (self.norm(x),)).relu())


class DoubledRow(Block):
    """The same of a layer that is split by rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + functional_call(self.down, {"weight": self.down.weight * 2}, (self.up(self.norm(x)).relu(),))


class Raised(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 1


class Parametrized(Doubled):
    """One whose norm has a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.norm, "bias", Raised())


class Replacing(Block):
    """One that sets a forward on its norm, and takes it away."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm.forward = lambda input: input * 3
        try:
            return super().forward(x)
        finally:
            del self.norm.forward


def _doubled_before(module: nn.Module, held: tuple[Tensor]) -> tuple[Tensor] | None:
    return (held[0] * 2,) if isinstance(module, nn.LayerNorm) else None


class HookingAll(Block):
    """One that registers hooks on all modules in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        handles = (
            register_module_forward_pre_hook(_doubled_before),  # pyright: ignore[reportArgumentType]
            register_module_forward_hook(lambda module, _, made: made * 2 if isinstance(module, nn.Linear) else None),
        )
        try:
            return super().forward(x)
        finally:
            for handle in handles:
                handle.remove()


class HookingTables(Block):
    """One that writes to the table of hooks of its layer."""

    def forward(self, x: Tensor) -> Tensor:
        self.up._forward_hooks[-1] = lambda _, __, made: made * 2
        try:
            return super().forward(x)
        finally:
            del self.up._forward_hooks[-1]


class AroundAll(Model):
    """One that calls a whole block with other parameters."""

    def forward(self, ids: Tensor) -> Tensor:
        x, (first, second) = self.table(ids), self.blocks
        changed = {name: parameter * 1.5 for name, parameter in second.named_parameters()}
        return self.head(second(functional_call(second, changed, (first(x),))))


UNUSUAL = (Doubled, DoubledColumn, DoubledRow, Parametrized, Replacing, HookingTables)


def of_blocks(kind: type[Block]) -> type[Model]:
    return type(f"{kind.__name__}Model", (Model,), {"block": kind})


def thrice(own: nn.Module, _: object) -> list[Tensor]:
    with torch.no_grad():
        return [own(IDS) for _ in range(3)]


@pytest.mark.parametrize("rules", [RULES, PLAIN], ids=["sequence", "plain"])
@pytest.mark.parametrize("kind", [*map(of_blocks, UNUSUAL), AroundAll], ids=lambda kind: kind.__name__)
@pytest.mark.one_in(5)
def test_what_a_forward_does_around_a_call_comes_before_the_direct_one(
    kind: type[Model], rules: dict[str, Any], uses: list[Direct]
) -> None:
    model = stock(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
        expected = model(IDS)
    for found in on_ranks(model, rules, 2, ((IDS,), {}), thrice):
        for made in found:
            torch.testing.assert_close(made, expected)
    assert uses


def test_hooks_on_all_modules_that_a_forward_registers_are_called() -> None:
    model = stock(of_blocks(HookingAll))
    with torch.no_grad():
        expected = model(IDS)
    ((*found,),) = on_ranks(model, PLAIN, 1, ((IDS,), {}), thrice)  # threads would share these hooks
    for made in found:
        torch.testing.assert_close(made, expected)


def test_a_hook_on_a_gradient_is_called_where_a_body_takes_one() -> None:
    def walk(own: nn.Module, _: object = None) -> list[Tensor]:
        found = thrice(own, None)
        own.get_submodule("blocks.0.up").register_full_backward_hook(lambda _, held, __: (held[0] * 2,))
        return [*found, *thrice(own, None)]

    expected = walk(stock(SteepModel))
    for found in on_ranks(stock(SteepModel), PLAIN, 2, ((IDS,), {}), walk):
        for made, one in zip(found, expected, strict=True):
            torch.testing.assert_close(made, one)


def test_a_root_that_is_called_with_other_parameters_has_these() -> None:
    def walk(own: Any, _: object = None) -> list[Tensor]:
        found = thrice(own, None)
        with torch.no_grad():
            changed = {"blocks.0.norm.weight": own.blocks[0].norm.weight * 2}
            found += [functional_call(own, changed, (IDS,)) for _ in range(2)]
        return [*found, *thrice(own, None)]

    expected = walk(stock())
    for found in on_ranks(stock(), PLAIN, 2, ((IDS,), {}), walk):
        for made, one in zip(found, expected, strict=True):
            torch.testing.assert_close(made, one)

"""A sharded model that is changed after `parallelize`: flags are followed, modules and counts are refused."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compiler.toys import HIDDEN, MLP, Mlp, plan_of
from tests.runtime.simulated import on_ranks, worst
from tests.runtime.world import Member, world
from tpplan.calls.guard import CallGuard
from tpplan.calls.proofs import Proofs
from tpplan.runtime.lower import Variants

TOLERANCE = 1e-12
EXAMPLE = ((torch.zeros(3, 12, HIDDEN, dtype=torch.float64),), {})


def x() -> Tensor:
    generator = torch.Generator().manual_seed(1)  # ranks are threads
    return torch.randn(3, 12, HIDDEN, dtype=torch.float64, generator=generator)


class Settings:
    """What several modules share."""

    def __init__(self) -> None:
        self.scale = 1.0


class Block(nn.Module):
    """A flag, a function, a module without numbers, settings, and an own attention with a count of heads."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.mlp, self.drop, self.act = Mlp(), nn.Dropout(0.0), nn.GELU()
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.heads, self.wide, self.function, self.settings = 4, False, torch.relu, settings

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).view(*x.shape[:2], self.heads, HIDDEN // 4).softmax(-1)
        y = y.softmax(2) if self.wide else y
        x = self.o(self.function(y).flatten(2)) * self.settings.scale
        return self.mlp(self.drop(self.act(x)))


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        settings = Settings()
        self.blocks = nn.ModuleList(Block(settings) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


RULES = {"blocks.*.q": "colwise", "blocks.*.o": "rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}


def stock() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def set_wide(model: Any) -> None:
    model.blocks[1].wide = True


def set_back(model: Any) -> None:
    model.blocks[1].wide = False


def set_function(model: Any) -> None:
    model.blocks[0].function = lambda y: y.cumsum(2)


def set_settings(model: Any) -> None:
    model.blocks[0].settings.scale = 0.0 if model.blocks[0].settings.scale else 1.0


def set_dictionary(model: Any) -> None:
    vars(model.blocks[0])["wide"] = True


@pytest.mark.parametrize("change", [set_wide, set_function])
def test_a_flag_or_a_function_is_followed(change: Callable[[Any], None]) -> None:
    calls = [(EXAMPLE[0], {}), ((x(),), {}), change, ((x(),), {}), set_back, ((x(),), {}), change, ((x(),), {})]
    assert max(worst(stock(), RULES, 2, EXAMPLE, calls)) < TOLERANCE


class Described:
    """Writes to the instance's `__dict__`, as properties with a setter do."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else owner.__dict__.get("_described", False)

    def __set__(self, owner: Any, value: bool) -> None:
        owner.__dict__["_described"] = value


class ByOwnState(Mlp):
    """Attributes decide that others than `__setattr__` may write."""

    described = Described()

    def __init__(self) -> None:
        super().__init__()
        self.wide = False
        self.kept: bool | None = None

    @functools.cached_property
    def factor(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = False
        y = self.up(x) * self.factor
        y = y.softmax(-1) if self.wide or self.described or self.kept else y
        return self.down(y.cumsum(-1) if getattr(self, "late", False) else y)


PAST: dict[str, Callable[[Any], Any]] = {
    "dict": lambda model: vars(model).update(wide=True),
    "new": lambda model: vars(model).update(late=True),
    "object": lambda model: object.__setattr__(model, "wide", True),
    "descriptor": lambda model: setattr(model, "described", True),
    "cached": lambda model: vars(model).update(factor=3.0),
    "what forwards write": lambda model: vars(model).update(kept=True),
}


@pytest.mark.parametrize("change", PAST.values(), ids=PAST)
def test_what_is_written_past_setattr_is_followed(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    before = ((x(),), {}), ((x(),), {})
    assert max(worst(ByOwnState().double(), MLP, 2, EXAMPLE, [*before, change, *before])) < TOLERANCE


def test_without_the_stamp_the_old_proof_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpplan.calls.changes.Changes.look", lambda self: False)
    calls = [((x(),), {}), set_wide, ((x(),), {})]
    assert max(worst(stock(), RULES, 2, EXAMPLE, calls)) > 1e-6


class BySettings(Mlp):
    """Settings decide whether all features are needed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y.softmax(-1) if self.settings.scale != 1.0 else functional.gelu(y))


def test_a_flag_in_settings_is_followed() -> None:
    torch.manual_seed(0)
    scaled = lambda model: setattr(model.settings, "scale", 0.5)  # noqa: E731
    calls = [((x(),), {}), scaled, ((x(),), {})]
    assert max(worst(BySettings().double(), MLP, 2, EXAMPLE, calls)) < TOLERANCE


class Slotted:
    """Settings without a dict."""

    __slots__ = ("unset", "wide")

    def __init__(self) -> None:
        self.wide = False


class ByContents(Mlp):
    """Dicts, lists and numbers in them decide, and other containers and objects."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"wide": False, "more": {"factors": [1]}, "flag": 1}
        self.names = ["narrow"]
        self.slotted, self.read, self.queue = Slotted(), defaultdict[str, bool](bool), deque([False], maxlen=1)
        self.ordered = OrderedDict(wide=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.options["more"]["factors"][0]
        y = y.softmax(-1) if self.options["wide"] or "wide" in self.names else y
        y = y.softmax(-1) if self.read["wide"] or self.queue[0] or self.ordered["wide"] else y
        y = y.softmax(-1) if self.slotted.wide else y
        return self.down(y.log_softmax(-1) if self.options["flag"] is True else functional.gelu(y))


CONTENTS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda model: model.options.update(wide=True),
    "list": lambda model: model.names.append("wide"),
    "nested": lambda model: model.options["more"]["factors"].__setitem__(0, 3),
    "type": lambda model: model.options.__setitem__("flag", True),
    "slots": lambda model: setattr(model.slotted, "wide", True),
    "defaultdict": lambda model: model.read.update(wide=True),
    "deque": lambda model: model.queue.append(True),
    "ordered": lambda model: model.ordered.update(wide=True),
}


@pytest.mark.parametrize("change", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.one_in(5)
def test_what_a_module_holds_may_be_changed_in_place(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    calls = [((x(),), {}), change, ((x(),), {}), ((x(),), {})]
    assert max(worst(ByContents().double(), MLP, 2, EXAMPLE, calls)) < TOLERANCE


class Lora(nn.Module):
    """As an adapter library's layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.down, self.up = base, nn.Linear(HIDDEN, 2), nn.Linear(2, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Wraps(nn.Module):
    """As an activation checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def adapt(model: Any) -> None:
    model.blocks[0].q = Lora(model.blocks[0].q).double()


def replace(model: Any) -> None:
    model.blocks[0].act = nn.ReLU()


def remove(model: Any) -> None:
    del model.blocks[0].mlp


def add(model: Any) -> None:
    model.blocks[0].add_module("more", nn.Linear(2, 2))


def set_parameter(model: Any) -> None:
    model.blocks[0].q.weight = nn.Parameter(torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64))


def set_count(model: Any) -> None:
    model.blocks[0].heads = 4


class Twice(nn.Linear):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def set_class(model: Any) -> None:
    model.blocks[0].q.__class__ = Twice


def hide_weight(model: Any) -> None:
    vars(model.blocks[0].q)["weight"] = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)


def hide_bias(model: Any) -> None:
    object.__setattr__(model.blocks[0].mlp.down, "bias", None)


def hide_layer(model: Any) -> None:
    vars(model.blocks[1])["o"] = nn.Linear(HIDDEN, HIDDEN).double()


REFUSED: dict[Callable[[Any], None], str] = {
    hide_weight: "`blocks.0.q.weight` was hidden by something in the `__dict__` of its module",
    hide_bias: "`blocks.0.mlp.down.bias` was hidden",
    hide_layer: "`blocks.1.o` was hidden",
    adapt: "`blocks.0.q`, a `Linear`, was replaced by a `Lora`",
    replace: "`blocks.0.act`, a `GELU`, was replaced by a `ReLU`",
    remove: "`blocks.0.mlp`, a `",
    add: "`blocks.0.more`, a `Linear`, was added",
    set_parameter: "`blocks.0.q.weight` was replaced by a Parameter of shape (16, 16)",
    set_count: "`blocks.0.heads`, which counts what this rank holds, was set",
    set_class: "`blocks.0.q.__class__` was set to `Twice`",
}


def refused(model: nn.Module) -> str:
    with pytest.raises(tpplan.UnprovedCallError) as raised:
        model(x())
    return str(raised.value)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_no_proof_can_follow_is_refused_at_every_call(change: Callable[[Any], None]) -> None:
    def work(model: Any, _: CallGuard) -> list[str]:
        model(x())
        change(model)
        return [refused(model), refused(model)]

    for texts in on_ranks(stock(), RULES, 2, EXAMPLE, work):
        for text in texts:
            assert text.startswith(f"TP130 changed-model: {REFUSED[change]}"), text
            assert "help: change the stock model before `parallelize`" in text


@pytest.mark.parametrize("hide", [hide_weight, hide_bias, hide_layer], ids=lambda hide: hide.__name__)
def test_what_hides_a_tensor_or_a_module_is_refused_until_it_is_gone(hide: Callable[[Any], None]) -> None:
    def work(model: Any, _: CallGuard) -> None:
        with torch.no_grad():
            before, names = model(x()), {module: {*vars(module)} for module in model.modules()}
            hide(model)
            assert "was hidden" in refused(model)
            for module, held in names.items():
                for name in {*vars(module)} - held:
                    vars(module).pop(name)
            torch.testing.assert_close(model(x()), before)

    on_ranks(stock(), RULES, 2, EXAMPLE, work)
    model = stock()
    hide(model)
    with pytest.raises(tpplan.CompileError, match=r"TP112.* is hidden by an attribute of the same name"):
        tpplan.compile_plan(model, plan_of(RULES), 2, EXAMPLE[0])


def wrap(model: Any) -> None:
    forward = model.blocks[0].q.forward
    model.blocks[0].q.forward = lambda y: forward(y).softmax(-1)


def wrap_block(model: Any) -> None:
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda y: forward(y.softmax(1))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("change", [wrap, wrap_block], ids=lambda change: change.__name__)
@pytest.mark.one_in(3)
def test_a_forward_set_on_an_instance_may_compute_nothing(change: Callable[[Any], None], recorded: bool) -> None:
    def work(model: Any, _: CallGuard) -> list[str]:
        with torch.set_grad_enabled(recorded):
            before = [model(x()), model(x())]
            change(model)
            messages = [refused(model), refused(model)]
            for module in model.modules():
                vars(module).pop("forward", None)
            model.blocks[0].q.forward = functools.partial(model.blocks[0].q.forward)
            torch.testing.assert_close([model(x()), model(x())], before)
        return messages

    for messages in on_ranks(stock(), RULES, 2, EXAMPLE, work):
        expected = r"TP130 changed-model: `blocks\.0(\.q)?\.forward` was set after `parallelize`.*it calls `softmax`"
        assert all(re.match(expected, held) for held in messages)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", ["forward", "__call__"])
@pytest.mark.parametrize("kind", [Block, nn.Linear, nn.GELU])
def test_a_function_set_on_a_class_is_refused(
    kind: type[nn.Module], name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(model: Any, guard: CallGuard) -> None:
        with torch.set_grad_enabled(recorded):
            before = [model(x()), model(x())]
            function = getattr(kind, name)
            with monkeypatch.context() as patched:
                patched.setattr(kind, name, lambda module, y: function(module, y) * 2)
                for _ in range(2):
                    assert f"TP130 changed-model: `{kind.__name__}.{name}` was replaced" in refused(model)
            torch.testing.assert_close([model(x()), model(x())], before)

    on_ranks(stock(), RULES, 1, EXAMPLE, work)


def test_what_is_put_back_is_proved_again() -> None:
    def work(model: Any, _: CallGuard) -> bool:
        before, layer, heads = model(x()), model.blocks[0].q, model.blocks[0].heads
        adapt(model)
        set_count(model)
        refused(model)
        model.blocks[0].q = layer
        refused(model)
        model.blocks[0].heads = heads
        return torch.equal(before, model(x()))

    assert on_ranks(stock(), RULES, 2, EXAMPLE, work) == [True, True]


def test_a_module_that_only_wraps_others_may_take_their_place() -> None:
    def wrap(model: Any) -> None:
        model.blocks = nn.ModuleList(Wraps(block) for block in model.blocks)

    def wrap_one(model: Any) -> None:
        model.blocks[0].mlp = Wraps(model.blocks[0].mlp)

    for change in (wrap, wrap_one):
        outputs = on_ranks(stock(), RULES, 2, EXAMPLE, lambda m, _: (m(x()), change(m), m(x())))  # noqa: B023
        assert all(torch.equal(one, other) for one, _, other in outputs)


def bypass(model: Any) -> None:
    model.blocks[0]._modules["q"] = Lora(model.blocks[0].q).double()


def test_a_replacement_that_tells_nobody_is_found_at_the_next_call() -> None:
    def work(model: Any, _: CallGuard) -> str:
        model(x())
        bypass(model)
        return refused(model)

    assert all("`blocks.0.q`" in text for text in on_ranks(stock(), RULES, 2, EXAMPLE, work))


def test_under_debug_every_change_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPPLAN_DEBUG", "1")

    def work(model: Any, _: CallGuard) -> str:
        model(x())
        bypass(model)
        return refused(model)

    assert all("`blocks.0.q`" in text for text in on_ranks(stock(), RULES, 2, EXAMPLE, work))
    calls = [((x(),), {}), set_dictionary, ((x(),), {})]
    assert max(worst(stock(), RULES, 2, EXAMPLE, calls)) < TOLERANCE


class Counts(Mlp):
    """A forward that writes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class CountsInside(Mlp):
    """A forward that writes to what its module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.settings = {"calls": 0}, Settings()

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        self.settings.scale += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [Counts, CountsInside])
@pytest.mark.parametrize("debug", ["", "1"])
def test_what_a_forward_writes_is_no_change(kind: type[Mlp], debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPPLAN_DEBUG", debug)
    changes: list[int] = []
    forget = Proofs.forget
    monkeypatch.setattr("tpplan.calls.proofs.Proofs.forget", lambda self: (changes.append(1), forget(self)))
    on_ranks(kind().double(), MLP, 2, EXAMPLE, lambda model, _: [model(x()) for _ in range(3)] and None)
    assert not changes


def test_modules_look_as_before_and_can_be_pickled() -> None:
    whole = str(stock().blocks[0].drop)  # pyright: ignore

    def work(model: Any, _: CallGuard) -> None:
        drop = model.blocks[0].drop
        assert str(drop) == whole and isinstance(drop, nn.Dropout)
        assert type(pickle.loads(pickle.dumps(drop))) is nn.Dropout
        assert isinstance(model.blocks[:1], nn.ModuleList)

    on_ranks(stock(), RULES, 2, EXAMPLE, work)


def copied(member: Member) -> bool:
    whole = stock()
    whole.itself = weakref.ref(whole)  # pyright: ignore
    model = tpplan.parallelize(whole, {"version": 1, "modules": RULES}, member.mesh(), EXAMPLE[0])
    other, before = copy.deepcopy(model), model(x())
    set_wide(other)
    differs = bool((other(x()) - before).abs().max() > 1e-6)
    adapt(other)
    return differs and "TP130" in refused(other) and torch.equal(model(x()), before)


@pytest.mark.processes
def test_a_copy_follows_its_own_changes() -> None:
    assert world(2).run(copied) == [True, True]


def test_attributes_of_another_program_are_tpplans_own_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of programs sets local counts, which nobody else did."""
    put_in = Variants.put_in
    seen: list[int] = []
    monkeypatch.setattr(Variants, "put_in", lambda self, prepared: (seen.append(1), put_in(self, prepared))[1])
    wide = [((x(),), {}), set_wide, ((x(),), {}), set_back, ((x(),), {})]
    assert max(worst(stock(), RULES, 2, EXAMPLE, wide)) < TOLERANCE
    assert len(seen) > 4


class MayCheckpoint(nn.Module):
    """As transformers' layers do it: a flag, and a function to call the body by."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.checkpoints, self.function = Mlp(), False, None

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints and self.training:
            return self.function(self.mlp, x.exp())  # pyright: ignore
        return self.mlp(x.exp())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_may_be_enabled_afterwards(reentrant: bool) -> None:
    def enable(model: Any) -> None:
        model.checkpoints, model.function = True, functools.partial(checkpoint, use_reentrant=reentrant)

    torch.manual_seed(0)
    rules = {"mlp.up": "colwise", "mlp.down": "rowwise"}
    calls = [((x().requires_grad_(),), {}), enable, ((x().requires_grad_(),), {})]
    assert max(worst(MayCheckpoint().double(), rules, 2, EXAMPLE, calls)) < TOLERANCE

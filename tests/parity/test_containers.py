"""Results in any container reach the caller whole, or are refused; so are sizes that are a rank's own."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tpplan.compiler.ir import pytree
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.plan import CompileError
from tpplan.runtime.lower import lower

PLAN = {"version": 1, "modules": {"up": "colwise"}}
PAIR = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
X = torch.randn(2, 3, 8)


@dataclass
class Record:
    y: Any
    n: int = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    y: Any
    n: int = 1


class OwnList(list[Any]):
    pass


class OwnDict(dict[str, Any]):
    pass


class OwnTuple(tuple[Any, ...]):
    pass


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Named(NamedTuple):
    y: Any
    n: int


class Opaque:
    def __init__(self, y: Any) -> None:
        self.y = y


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y: Any) -> None:
        self.y = y


def tagged(y: Tensor) -> OwnList:
    made = OwnList()
    made.tag = y  # pyright: ignore
    return made


WALKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Record, lambda r: r.y),
    "frozen dataclass with slots": (Frozen, lambda r: r.y),
    "subclass of list": (lambda y: OwnList([y]), lambda r: r[0]),
    "attribute of a list": (tagged, lambda r: r.tag),
    "subclass of dict": (lambda y: OwnDict(y=y), lambda r: r["y"]),
    "subclass of tuple": (lambda y: OwnTuple((y,)), lambda r: r[0]),
    "dict with attributes": (lambda y: Attributes(y=y), lambda r: r.y),
    "named tuple": (lambda y: Named(y, 1), lambda r: r.y),
    "namespace": (lambda y: types.SimpleNamespace(y=y, n=2), lambda r: r.y),
    "ordered dict": (lambda y: collections.OrderedDict(y=y), lambda r: r["y"]),
    "default dict": (lambda y: collections.defaultdict(list, y=y), lambda r: r["y"]),
    "deque": (lambda y: collections.deque([y]), lambda r: r[0]),
    "nested": (lambda y: [Record(OwnList([y]))], lambda r: r[0].y[0]),
    "torch's own": (lambda y: torch.sort(y), lambda r: r.values),
}
OPAQUE: dict[str, Callable[[Tensor], Any]] = {
    "object": Opaque,
    "slots": Slotted,
    "function": lambda y: lambda: y,
    "set": lambda y: {y},
    "behind objects": lambda y: [Opaque(Opaque((1, y)))],
}


class Wraps(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.wrap = nn.Linear(8, 16), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.up(x))


@pytest.mark.parametrize("kind", WALKED)
def test_a_result_in_any_container_is_whole(kind: str) -> None:
    wrap, unwrap = WALKED[kind]
    model = Wraps(wrap)
    for result in on_ranks(model, PLAN):
        assert torch.allclose(unwrap(result), unwrap(model(X)), atol=1e-6)


def on_ranks(model: nn.Module, plan: dict[str, Any]) -> list[Any]:
    """What each of two ranks returns to its caller."""
    program = tpplan.compile_plan(model, plan, 2, X)

    def work(axis: ThreadCommunicator) -> Any:
        return lower(copy_structure(model), program, SimulatedDistributor(axis))(X)

    return run_ranks(2, work)


@pytest.mark.parametrize("kind", WALKED)
def test_a_copy_of_a_container_is_of_its_class_and_shares_nothing(kind: str) -> None:
    wrap, unwrap = WALKED[kind]
    held = wrap(X)
    before = unwrap(held)
    copied = pytree.Walk(lambda _, item: item + 1 if isinstance(item, Tensor) else item)(held)
    assert type(copied) is type(held) and unwrap(held) is before
    assert torch.equal(unwrap(copied), before + 1)


@pytest.mark.parametrize("kind", OPAQUE)
def test_a_part_in_an_object_that_nobody_can_look_into_is_refused(kind: str) -> None:
    with pytest.raises(CompileError, match=r"TP107 .* returns a .* with a tensor of layout S\(2\)"):
        tpplan.compile_plan(Wraps(OPAQUE[kind]), PLAN, 2, X)


def test_a_whole_tensor_may_leave_in_any_object() -> None:
    plan = {"version": 1, "modules": {"up": {"style": "colwise", "output": "replicate"}}}
    tpplan.compile_plan(Wraps(Opaque), plan, 2, X)


class Inner(nn.Module):
    """It returns how many features there are of what its linear layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        h = self.up(x)
        return self.down(h.relu()), h.shape[-1]


class Counts(nn.Module):
    """What its caller makes of the number is `use`'s."""

    def __init__(self, use: Callable[[Tensor, int], Any], layers: int = 1) -> None:
        super().__init__()
        self.layers, self.use = nn.ModuleList(Inner() for _ in range(layers)), use

    def forward(self, x: Tensor) -> Any:
        count = 0
        for layer in self.layers:
            x, count = layer(x)
        return self.use(x, count)


INNER = {"version": 1, "modules": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}}
USES: dict[str, Callable[[Tensor, int], Any]] = {
    "returned": lambda x, count: (x, count),
    "in words": lambda x, count: (x, f"{count} features"),
    "as a float": lambda x, count: {"y": x, "share": count / 2},
    "computed with": lambda x, count: x / count,
    "filled with": lambda x, count: x + torch.full_like(x, count),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_a_size_of_a_rank_never_stands_for_a_size_of_the_model(use: str, layers: int) -> None:
    try:
        model = Counts(USES[use], layers)
        results = on_ranks(model, INNER)
    except CompileError as error:
        assert {d.code for d in error.diagnostics} == {"TP107"}, str(error)
    else:
        expected = dict(pytree.leaves(model(X)))
        for result in results:
            for path, held in pytree.leaves(result):
                same = (
                    torch.allclose(held, expected[path], atol=1e-6)
                    if isinstance(held, Tensor)
                    else held == expected[path]
                )
                assert same, path

"""Calls of other sizes: each computes what the stock model does at that size, or is refused with the condition."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.simulated import on_ranks, verdicts
from tpplan.calls import guard
from tpplan.calls.guard import CallGuard

HIDDEN, WIDTH = 16, 32
TOLERANCE = 1e-12
MLP = {"up": "colwise", "down": "rowwise"}
SEQUENCE = {"norm": "sequence", **MLP}
Between = Callable[[Tensor], Tensor]


class Features(nn.Module):
    """A column, what `between` makes of the split features, and a row."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Normed(nn.Module):
    """What `between` makes of a split sequence, and of the numbers behind."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = Inner(between)
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.inner(self.norm(x)))))


class Inner(nn.Module):
    """A body of its own, so that what it is given may stay split."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.between = between

    def forward(self, n: Tensor) -> Tensor:
        return self.between(n)


def _by_dict(h: Tensor) -> Tensor:
    return h * {8: 2.0}.get(h.shape[1], 3.0 + h.shape[-1])


def _strided(n: Tensor) -> Tensor:
    k = max(1, n.shape[1] // 8)
    return n[:, ::k].repeat_interleave(k, 1)


def _padded(n: Tensor) -> Tensor:
    k = int(n.shape[1] > 8)
    return functional.pad(n, (0, 0, k, -k))


def _padded_by_eights(n: Tensor) -> Tensor:
    k = n.shape[1] // 8 - 1
    return functional.pad(n, (0, 0, k, -k))


def _by_text(h: Tensor) -> Tensor:
    return h / (h.shape[-1] if len(f"{h.shape[1]}") > 1 else 32)


def _by_class(h: Tensor) -> Tensor:
    n = h.shape[1]
    return h / (h.shape[-1] if isinstance(n, int) and n > 8 else 32)


def _by_type(h: Tensor) -> Tensor:
    n = h.shape[1]
    return h / (h.shape[-1] if type(n) is int and n > 8 else 32)


@functools.singledispatch
def _is_number(_: object) -> bool:
    return False


@_is_number.register
def _(_: int) -> bool:
    return True


def _asked(asks: Callable[[Any], bool]) -> Between:
    return lambda h: h / (h.shape[-1] if asks(h.shape[1]) and h.shape[1] > 8 else 32)


def _by_pattern(h: Tensor) -> Tensor:
    match h.shape[1]:
        case int(n) if n > 8:
            return h / h.shape[-1]
        case _:
            return h / 32


FEATURES: dict[str, Between] = {
    "a divisor": lambda h: h / (32 if h.shape[1] <= 8 else h.shape[-1]),
    "a dim": lambda h: h.cumsum(1 if h.shape[1] <= 8 else 2),
    "an equation": lambda h: torch.einsum("bsf,bsf->bsf" if h.shape[1] <= 8 else "bsf,bsg->bsf", h, h),
    "a stride": _strided,
    "a pad of features": lambda h: functional.pad(h, (k := h.shape[1] // 8 - 1, -k)),
    "a shift of features": lambda h: h.roll(h.shape[1] // 8 - 1, -1),
    "a number in a dict": _by_dict,
    "text": _by_text,
    "a test of a class": _by_class,
    "a test of a type": _by_type,
    "a pattern": _by_pattern,
    "a type's name": _asked(lambda n: type(n).__name__ == "int"),
    "a type in a dict": _asked(lambda n: {int: True}.get(type(n), False)),
    "a class": _asked(lambda n: n.__class__ is int),
    "no symbol": _asked(lambda n: not isinstance(n, torch.SymInt) and not hasattr(n, "node")),
    "a generic function": _asked(_is_number),
    "a logarithm": lambda h: h * (1.0 if math.log2(h.shape[1]) <= 3 else h.shape[-1]),
    "a slice of features": lambda h: h[..., : 32 if h.shape[1] <= 8 else 16].sum(-1, keepdim=True) * h,
    "groups": lambda h: h.reshape(h.shape[0], -1, h.shape[1] * 4).softmax(-1).reshape(h.shape),
    "a tensor of a number": lambda h: h * torch.tensor(1 if h.shape[1] <= 8 else h.shape[-1]),
    "min": lambda h: h / min(h.shape[1] * 4, h.shape[-1] * 2),
}
LENGTHS: dict[str, Between] = {
    "a divisor": lambda n: n / (8 if n.shape[1] <= 8 else n.shape[1]),
    "a branch": lambda n: n * 2 if n.shape[1] > 8 else n,
    "a stride": _strided,
    "a pad": _padded,
    "a pad by eights": _padded_by_eights,
    "a shift": lambda n: n.roll(n.shape[1] // 8 - 1, 1),
    "a slice": lambda n: functional.pad(n[:, :8], (0, 0, 0, n.shape[1] - n[:, :8].shape[1])),
    "a slice from the end": lambda n: torch.cat([n[:, -8:] * 2, n[:, :-8]], 1),
    "a flip": lambda n: n.flip(1 if n.shape[1] > 8 else 2),
    "a mean": lambda n: n - n.mean(1 if n.shape[1] > 8 else 2, keepdim=True),
    "a sum by a length": lambda n: n + n.sum(1, keepdim=True) / n.shape[1],
}


def call(length: int, batch: int = 2) -> Any:
    generator = torch.Generator().manual_seed(length)
    return (torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_(),), {}


def of(stock: Callable[[Between], nn.Module], between: Between) -> nn.Module:
    torch.manual_seed(0)
    return stock(between).double()


@pytest.mark.one_in(27)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("stock", "rules", "between"),
    [
        *(pytest.param(Features, MLP, between, id=f"features, {name}") for name, between in FEATURES.items()),
        *(pytest.param(Normed, SEQUENCE, between, id=f"sequence, {name}") for name, between in LENGTHS.items()),
    ],
)
def test_a_call_of_another_length_is_equal_or_refused(stock: Any, rules: Any, between: Between, tp: int) -> None:
    lengths = (8, 16, 4, 24, 8)
    found = verdicts(of(stock, between), rules, tp, call(8), [call(length) for length in lengths])
    assert found[0] == found[-1]
    for verdict in found:
        assert verdict.startswith(("TP117", "TP131", "TP118")) if isinstance(verdict, str) else verdict < TOLERANCE


@pytest.mark.parametrize(("stock", "rules"), [(Features, MLP), (Normed, SEQUENCE)])
def test_a_covered_length_is_neither_compiled_nor_watched(
    stock: Any, rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    prove_again = guard.prove
    monkeypatch.setattr(guard, "prove", lambda request: compiled.append(request) or prove_again(request))

    def work(own: nn.Module, held: CallGuard) -> list[bool]:
        own(*call(8)[0])
        return [held(True, call(length, batch)[0], {})[1] is not None for length, batch in ((16, 2), (24, 3), (6, 5))]

    assert on_ranks(of(stock, torch.relu), rules, 2, call(8), work) == [[False] * 3] * 2
    assert not compiled


NUMBERS: dict[str, Between] = {
    "int": lambda h: functional.pad(h, (k := int(h.detach().amax() // 20 > 0), -k)),
    "float": lambda h: h * (float(h.detach().amax() > 20) + 1),
    "an index": lambda h: h * [1, h.shape[-1]][h.detach().amax() > 20],
    "is_nonzero": lambda h: h.roll(int((h.detach().amax() > 20).is_nonzero()), -1),
}


@pytest.mark.parametrize("between", NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_python_makes_of_a_flag_is_followed(between: Between) -> None:
    (small,), _ = call(8)
    calls = [((small.detach() * scale,), {}) for scale in (1.0, 1000.0, 1.0, 1000.0, 1.0)]
    for verdict in verdicts(of(Features, between), MLP, 2, calls[0], calls):
        assert verdict.startswith(("TP117", "TP131")) if isinstance(verdict, str) else verdict < TOLERANCE


def _sized_on_one_side(h: Tensor) -> Tensor:
    return h / (32 if h.shape[1] <= 8 else h.shape[-1]) if h.detach().abs().max() > 100 else h.relu()


def _looked_up_beside_a_branch(h: Tensor) -> Tensor:
    return (h * 2 if h.detach().abs().max() > 100 else h) * {8: 2.0}.get(h.shape[1], 3.0)


@pytest.mark.parametrize("between", [_sized_on_one_side, _looked_up_beside_a_branch])
def test_each_side_of_a_branch_has_conditions_of_its_own(between: Between) -> None:
    def scaled(length: int, scale: float) -> Any:
        (x,), _ = call(length)
        return ((x.detach() * scale).requires_grad_(),), {}

    places = [(8, 1.0), (8, 1e3), (8, 1e3), (16, 1.0), (16, 1e3), (16, 1e3), (8, 1e3), (16, 1.0)]
    found = verdicts(of(Features, between), MLP, 2, call(8), [scaled(*place) for place in places])
    for verdict in found:
        assert verdict.startswith(("TP117", "TP131")) if isinstance(verdict, str) else verdict < TOLERANCE
    assert not isinstance(found[-1], str)


class Listed(nn.Module):
    """A column and a row for each item of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, items: list[Tensor]) -> Tensor:
        dim = 1 if items[0].shape[1] == items[1].shape[1] else 2
        return torch.cat([self.down(self.up(item).cumsum(dim)) for item in items], 1)


def test_items_of_a_list_may_have_other_lengths_than_equal_ones() -> None:
    def listed(*lengths: int) -> Any:
        return ([call(length)[0][0] for length in lengths],), {}

    places = [(8, 8), (5, 5), (5, 9), (7, 3), (4, 4), (9, 5)]
    torch.manual_seed(0)
    found = verdicts(Listed().double(), MLP, 2, listed(8, 8), [listed(*place) for place in places])
    for verdict, (first, second) in zip(found, places, strict=True):
        if first != second and isinstance(verdict, str):
            assert verdict.startswith("TP117")
        else:
            assert isinstance(verdict, float) and verdict < TOLERANCE

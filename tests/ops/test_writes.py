"""Operators of others that write to an argument and don't return it: what is read afterwards is what they wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import worst

LIBRARY = torch.library.Library("tests_writes", "FRAGMENT")
LIBRARY.define("add_to(Tensor(a!) x, Tensor y) -> ()")
LIBRARY.define("next_to(Tensor x, Tensor(a!) out, Tensor(b!)? other=None) -> Tensor")
LIBRARY.define("add_to_all(Tensor(a!)[] xs, Tensor y) -> ()")
TOLERANCE = 1e-12  # of float64, relative


def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def next_to(x: Tensor, out: Tensor, other: Tensor | None = None) -> Tensor:
    for held in (out, other):
        if held is not None:
            held.copy_(x * 2)
    return x + 1


def add_to_all(xs: list[Tensor], y: Tensor) -> None:
    for x in xs:
        x.add_(y)


LIBRARY.impl("add_to_all", add_to_all, "CPU")
LIBRARY.impl("add_to_all", lambda xs, y: None, "Meta")
LIBRARY.impl("add_to", add_to, "CPU")
LIBRARY.impl("add_to", lambda x, y: None, "Meta")
LIBRARY.impl("next_to", next_to, "CPU")
LIBRARY.impl("next_to", lambda x, out, other=None: torch.empty_like(x), "Meta")


class Writes(nn.Module):
    """Numbers for each place, which operators write; in a body that runs from its record if it counts by its width."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        made = self.up(x).tanh()
        made = made.view(batch, length, 4, width // 4).flatten(2) if self.counts else made
        place = torch.zeros(length, dtype=x.dtype, device=x.device)
        torch.ops.tests_writes.add_to(place, torch.arange(length, dtype=x.dtype, device=x.device))
        out, other = torch.empty_like(place), torch.empty_like(place)
        view = out[:]
        following = torch.ops.tests_writes.next_to(place, out, other=other)
        return self.down(made) * (place + following + view + other)[:, None]


class Around(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner = Writes(counts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def call(batch: int, length: int) -> Any:
    return (torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length)).double(),), {}


@pytest.mark.parametrize("counts", [False, True])
def test_what_they_write_is_read(counts: bool) -> None:
    torch.manual_seed(0)
    rules = {"inner.up": "colwise", "inner.down": "rowwise"}
    model = Around(counts).double()
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 2, call(2, 6)[0])
    assert program.count_collectives() == {"all-reduce": 1}
    assert [spec.name for spec in program.modules if spec.recorded is not None] == (["inner"] if counts else [])
    assert max(worst(model, rules, 2, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE


def over_all(place: Tensor, y: Tensor) -> Tensor:
    place.fill_(y)
    return place


def to_a_part(place: Tensor, y: Tensor) -> Tensor:
    part, other = place[1:], place[2:]
    part.copy_(y)
    return place * 2 + other.sum()


def by_an_index(place: Tensor, y: Tensor) -> Tensor:
    place[1:] = y
    return place


def by_out(place: Tensor, y: Tensor) -> Tensor:
    torch.add(place, y, out=place)
    return place


def by_an_operator(place: Tensor, y: Tensor) -> Tensor:
    torch.ops.tests_writes.add_to(place[1:], y)
    return place


def in_a_list(place: Tensor, y: Tensor) -> Tensor:
    torch.ops.tests_writes.add_to_all([place, place[2:]], y)
    return place


def by_torch_in_a_list(place: Tensor, y: Tensor) -> Tensor:
    torch.ops.aten._foreach_add_.List([place[1:]], [y])
    return place


WAYS = (over_all, to_a_part, by_an_index, by_out, by_an_operator, in_a_list, by_torch_in_a_list)


class WritesParts(nn.Module):
    """Numbers that a body has made, and to which it writes what is split."""

    def __init__(self, write: Any, with_device: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.write, self.with_device = write, with_device

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x).tanh()
        device: dict[str, Any] = {"device": x.device} if self.with_device else {}
        written = self.write(torch.zeros(16, dtype=x.dtype, **device), made.detach().mean())
        return x + self.down(made) * written


@pytest.mark.one_in(3)
@pytest.mark.parametrize("with_device", [False, True])
@pytest.mark.parametrize("write", WAYS)
def test_what_is_split_and_written_is_whole_first(write: Any, with_device: bool) -> None:
    """What a body makes without a device has numbers in a capture, which aren't those that are written."""
    torch.manual_seed(0)
    rules = {"up": "colwise", "down": "rowwise"}
    model = WritesParts(write, with_device).double()
    assert max(worst(model, rules, 2, call(2, 6), [call(2, 6), call(3, 9)])) < TOLERANCE


def test_numbers_of_what_was_written_to_arent_told() -> None:
    model = WritesParts(lambda place, y: over_all(place, y).tolist()[0], False)
    with pytest.raises(tpplan.CompileError, match="TP110"):
        tpplan.compile_plan(model, {"version": 1, "modules": {"up": "colwise"}}, 2, call(2, 6)[0][0].float())


def test_no_help_gives_it_a_rule() -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 24)

        def forward(self, x: Tensor) -> Tensor:
            made = torch.zeros((), dtype=x.dtype, device=x.device)
            torch.ops.tests_writes.add_to(made, self.up.weight.detach().sum())
            return self.up(x) * made

    with pytest.raises(tpplan.CompileError) as caught:
        tpplan.compile_plan(Needs(), {"version": 1, "modules": {"up": "colwise"}}, 2, call(2, 6)[0][0].float())
    assert "register_operator" not in str(caught.value)

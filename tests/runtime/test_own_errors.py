"""What the unsharded model raises on a call, the sharded one raises as well: on all ranks, and stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tpplan
from tests.runtime.world import Member, world
from tpplan.compat.process_groups import fake_process_group

pytestmark = pytest.mark.processes

HIDDEN, LENGTH = 16, 6
PLANS: list[dict[str, Any]] = [
    {"up": "colwise", "down": "rowwise"},
    {"norm": "sequence", "up": "colwise", "down": "rowwise"},
]


class UnsupportedError(Exception):
    pass


class Strict(nn.Module):
    """A block that raises in several ways, and at calls that it can't take."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.places = nn.Parameter(torch.zeros(2 * LENGTH, HIDDEN))
        self.sizes = [1, 2, 3]

    def forward(self, x: Tensor, mask: Tensor | None = None, kind: str = "", options: Any = None) -> Tensor:
        if kind == "unsupported":
            raise UnsupportedError("no mask of this kind", x.shape)
        if kind == "index":
            return x * self.sizes[x.shape[1]]
        if kind == "key":
            return x * options[kind]
        if kind == "cause":
            try:
                return self.forward(x, kind="index")
            except IndexError as error:
                raise RuntimeError("a table that is too short") from error
        h = self.up(self.norm(x + self.places[: x.shape[1]])).relu()
        return x + self.down(h if mask is None else h * mask)


def calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    x = torch.randn(2, LENGTH, HIDDEN)
    return [
        ((x,), {"kind": "unsupported"}),
        ((x,), {"kind": "index"}),
        ((x,), {"kind": "key", "options": {}}),
        ((x,), {"kind": "cause"}),
        ((torch.randn(2, LENGTH, HIDDEN + 4),), {}),
        ((torch.randn(2, 3 * LENGTH, HIDDEN),), {}),
        ((x, torch.ones(2 * HIDDEN - 2)), {}),
        ((x.double(),), {}),
        (("text",), {}),
        ((), {}),
        ((x,), {"unknown": 1}),
        ((torch.randn(2, LENGTH + 4, HIDDEN),), {}),
        ((x,), {}),
    ]


def told(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    try:
        return model(*arguments, **keywords)
    except Exception as error:
        return type(error), str(error), type(error.__cause__)


@pytest.mark.slow
def test_errors_of_the_model_s_own_reach_the_caller() -> None:
    for number in range(len(PLANS)):
        world(2).run(_errors, number)


def _errors(member: Member, number: int) -> None:
    torch.manual_seed(0)
    stock = Strict()
    plan = {"version": 1, "modules": PLANS[number]}
    x = torch.randn(2, LENGTH, HIDDEN)
    model = tpplan.parallelize(copy.deepcopy(stock), plan, member.mesh(), inputs=(x,))
    for arguments, keywords in calls():
        expected, ours = told(stock, arguments, keywords), told(model, arguments, keywords)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(ours, expected)
        else:
            assert ours == expected, f"{ours} instead of {expected}"


class Counting(Strict):
    """It raises after it has written to its state."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = 0, None
        self.seen: list[int] = []
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None, kind: str = "", options: Any = None) -> Tensor:
        if options == "count":
            self.count += 1
        elif options == "seen":
            self.seen.append(x.shape[1])
        elif options == "steps":
            self.steps += 1
        elif options == "last":
            self.last = x * 2
        return super().forward(x, mask, kind)


@pytest.mark.parametrize("name", ["count", "seen", "steps", "last"])
def test_an_error_amid_writes_says_that_they_are_put_back(name: str) -> None:
    """A caller that catches the model's own error would go on with another state than unsharded."""
    x = torch.randn(2, LENGTH, HIDDEN)
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model: Any = tpplan.parallelize(Counting(), {"version": 1, "modules": PLANS[0]}, mesh, inputs=(x,))
        with pytest.raises(UnsupportedError):
            model(x, kind="unsupported")
        with pytest.raises(tpplan.UnprovedCallError, match=rf"UnsupportedError(.|\n)*had changed `{name}"):
            model(x, kind="unsupported", options=name)
    assert (model.count, model.seen, model.last, float(model.steps)) == (0, [], None, 0.0)

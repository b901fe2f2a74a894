"""Parameters in compiled functions of their owner's: steps of optimizers, penalties, clipping and edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.owner import Case, backward, gradients
from tests.runtime.test_owner import TOLERANCE, difference, sharded
from tests.runtime.world import Member, world

pytestmark = pytest.mark.processes
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def stepped(kind: str, **options: Any) -> Callable[[Any, Compile], None]:
    def case(model: Any, compiled: Compile) -> None:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        step = compiled(lambda: optimizer.step())
        for seed in range(3):
            backward(model, seed)
            step()

    return case


def lost(loss: Case) -> Callable[[Any, Compile], list[Any]]:
    def case(model: Any, compiled: Compile) -> list[Any]:
        model.zero_grad()
        made = compiled(loss)(model)
        made.backward()
        return [made, *gradients(model)]

    return case


def clipped(model: Any, compiled: Compile) -> list[Any]:
    backward(model)
    return [compiled(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01))(), *gradients(model)]


def edited(model: Any, compiled: Compile) -> None:
    def edit(weight: Tensor) -> None:
        weight.mul_(2).add_(1)

    with torch.no_grad():
        compiled(edit)(model.up.weight)


CASES: dict[str, Callable[[Any, Compile], Any]] = {
    "AdamW foreach": stepped("AdamW", foreach=True),
    "AdamW": stepped("AdamW", foreach=False),
    "SGD foreach": stepped("SGD", momentum=0.9, foreach=True),
    "SGD": stepped("SGD", foreach=False),
    "squares": lost(lambda m: sum(p.square().sum() for p in m.parameters())),
    "products": lost(lambda m: (m.up.weight @ m.up.weight.t()).square().sum() + m.up.weight[20].norm()),
    "norms of rows": lost(lambda m: m.up.weight.norm(dim=1).sum() + m.up.bias.norm()),
    "clipped": clipped,
    "edited": edited,
}
SOME = ["SGD foreach", "squares", "products", "edited"]


def differences(member: Member, name: str, cases: list[str], backend: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for case in cases:
        stock, model = sharded(member, name)
        made: list[Any] = []
        for held in (stock, model):  # both, as a compiled AdamW of torch's rounds otherwise
            torch._dynamo.reset()
            made.append(CASES[case](held, lambda function: torch.compile(function, backend=backend)))
        parameters = [[*held.parameters()] for held in (stock, model)]
        found[case] = max(difference(made[1], made[0]), difference(parameters[1], parameters[0]))
    return found


def check(name: str, cases: list[str], backend: str) -> None:
    for found in world(2).run(differences, name, cases, backend, seconds=600):
        assert len(found) == len(cases)
        assert {case: error for case, error in found.items() if not error < TOLERANCE} == {}


@pytest.mark.slow
def test_what_is_compiled_gives_the_unsharded_models_numbers() -> None:
    check("uneven", SOME, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["even", "uneven"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_so_does_all_that_is_compiled(name: str, backend: str) -> None:
    check(name, [*CASES], backend)

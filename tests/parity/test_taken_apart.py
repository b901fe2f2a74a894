"""Whatever a body does with the features of a split projection: it is proved equal, or refused with a code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpplan
from tests.parity.bodies import BATCH, FEATURES, LENGTH, WIDTH, random_body, random_plan
from tpplan.parity.compare import NOTHING_BUT_ZEROS

SAMPLE = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)


def outcome(model: nn.Module, plan: dict[str, object], tp: int) -> str:
    """`equal`, or the codes with which the plan is refused; anything else fails."""
    try:
        report = tpplan.verify(model, plan, tp, (SAMPLE,))
    except tpplan.CompileError as error:
        codes = {held.code for held in error.diagnostics}
        assert codes, "an error without findings"
        assert "TP199" not in codes, error
        return " ".join(sorted(codes))
    if report.problems == (NOTHING_BUT_ZEROS,):
        return "none but zeros"
    assert report.ok, report
    return "equal"


def test_random_bodies_are_equal_or_refused():
    outcomes = {}
    for seed in range(24):
        torch.manual_seed(seed)
        body = random_body(seed)
        try:
            outcomes[seed] = outcome(body, random_plan(seed, body), (2, 4)[seed % 2])
        except Exception as error:
            error.add_note(f"seed {seed}:\n{body.lines}")
            raise
    assert "equal" in outcomes.values()


class Body(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.project, self.after = nn.Linear(WIDTH, FEATURES), after

    def forward(self, x):
        return self.after(self.project(x))


def written_entry(h):
    h = h.clone()
    h[..., 0] = 0
    return h.tanh()


def written_entry_of_each_head(h):
    h = h.unflatten(-1, (-1, 4)).clone()
    h[..., 0] = 0
    return h.tanh()


def trapezoid(h):
    return torch.trapezoid(h, dim=-1)


def picked_from_behind(h):
    return h.index_select(-1, torch.tensor([47, 3]))


def picked_for_nobody(h):
    h.index_select(-1, torch.tensor([47, 3]))
    return h.tanh()


def indexed_for_nobody(h):
    h.movedim(1, -1)[:, [-18, -24]]
    return h.tanh()


def sliced_from_far_behind(h):
    return h[..., -100:24] * h[..., 24:]


def selected_then_viewed(h):
    return h.unflatten(-1, (3, 4, 4))[:, -1, 0].tanh()


def picked_in_halves(h):
    return h.index_select(-1, torch.arange(24)) * h.index_select(-1, torch.arange(24, 48))


def of_no_entries(h):
    return h.view(BATCH, LENGTH, 12, 4)[:, :0].reshape(BATCH, 0, 4, 12).sum() + h


AFTER = (
    written_entry, written_entry_of_each_head, trapezoid, picked_from_behind, picked_for_nobody, indexed_for_nobody,
    of_no_entries,
)  # fmt: skip


@pytest.mark.parametrize("after", AFTER)
def test_features_are_taken_apart(after):
    assert outcome(Body(after), {"version": 1, "modules": {"project": "colwise"}}, 4) == "equal"


@pytest.mark.parametrize(
    ("after", "packs"), [(sliced_from_far_behind, 2), (picked_in_halves, 2), (selected_then_viewed, 3)]
)
def test_packs_are_seen(after, packs):
    assert outcome(Body(after), {"version": 1, "modules": {"project": "colwise"}}, 4) == "TP106"
    named = {"style": "colwise", "packed": [f"part{i}" for i in range(packs)]}
    assert outcome(Body(after), {"version": 1, "modules": {"project": named}}, 4) == "equal"


def test_halves_of_another_dim_are_no_gate():
    """`chunk(2)` of a batch looks like a gate's halves, until its dim is looked at."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.out = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

        def forward(self, x):
            one, other = self.project(x).chunk(2)
            return self.out(nn.functional.silu(one) * other)

    assert outcome(Halves(), {"version": 1, "modules": {"project": "colwise", "out": "rowwise"}}, 2) == "equal"

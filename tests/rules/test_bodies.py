"""One-line bodies over split and partial values: each computes the same, or is refused by a finding; none crashes."""

from __future__ import annotations

import pytest
from torch import nn

from tests.rules.bodies import ALL, MODELS, Between, Split, Summed
from tests.rules.bodies_sweep import outcome

# Each was wrong once, or crashed.
MENDED = (
    (Split, "h.cumsum(-1)", "refused"),
    (Split, "h.sigmoid().cumprod(-1)", "refused"),
    (Split, "h.logcumsumexp(-1)", "refused"),
    (Split, "h.logcumsumexp(-2)", "equal"),
    (Split, "(h > 0).any(-1).float()", "refused"),
    (Split, "(h > 0).any().float() * h", "refused"),
    (Split, "h[..., 0] = 0", "refused"),
    (Between, "h[..., 0] = 0", "equal"),
    (Between, "torch.trapezoid(h)", "equal"),
    (Split, "a, b = h.chunk(2, -1); h = (b - a) if h.shape[-1] == n else (a - b)", "refused"),
    (Split, "a = h * 2; b = h * 3; a, b = (a, b) if h.shape[-1] > 13 else (b, a); h = a - b", "refused"),
    (Split, "h.topk(2).values", "refused"),
    (Split, "h.sort().values", "refused"),
    (Split, "h.sum(-1)", "equal"),
    (Summed, "h * 2", "equal"),
    (Summed, "h.sigmoid()", "refused"),
)


@pytest.mark.parametrize(("kind", "line", "expected"), MENDED, ids=lambda held: getattr(held, "__name__", held))
def test_a_body_that_was_wrong_is_what_it_should_be(kind: type[nn.Module], line: str, expected: str) -> None:
    assert outcome(kind, line).split()[0] == expected, outcome(kind, line)


@pytest.mark.parametrize("line", ALL[::12])
@pytest.mark.one_in(5)
def test_some_bodies_are_equal_or_refused(line: str) -> None:
    assert outcome(Split, line).split()[0] in ("equal", "refused", "none"), outcome(Split, line)


@pytest.mark.sweep
@pytest.mark.parametrize("line", ALL)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_every_body_is_equal_or_refused(kind: type[nn.Module], line: str) -> None:
    came = outcome(kind, line)
    assert came.split()[0] in ("equal", "refused", "none"), came


def test_the_bodies_are_many_and_torch_runs_nearly_all() -> None:
    assert len(set(ALL)) == len(ALL) >= 550

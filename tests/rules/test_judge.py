"""torch's own validation of sharding rules judges what ours say: by its ranks, its sums' terms and its comparisons.

Of layouts that DTensor has too, even ones: those are all that it can judge. The audit holds the others against numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.rules.calls import Call, calls_of
from tests.rules.numbers import Subject
from tests.rules.outcomes import local_arguments
from tests.rules.sweep import choices
from tests.rules.test_audit import QUICK
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.ir.layout import PARTIAL, Layout, sharded
from tpplan.compiler.rules.propagate import Propagator, Refusal

validation = pytest.importorskip("torch.distributed.tensor._ops.strategy_validation", reason="this torch has none")
_RANKS = 2


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(_RANKS):
        yield init_device_mesh("cpu", (_RANKS,))


def _verdicts(name: str, mesh: DeviceMesh) -> Iterator[tuple[str, bool | None, str]]:
    propagator = Propagator(_RANKS, 1)
    for call in calls_of(name, 2):
        subject = Subject(call)
        if subject.in_place or call.without_numbers:
            continue
        try:
            made = [t.detach() for t in subject.run(subject.operands)]
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue  # no call at all
        for layouts in choices(subject, _RANKS, 1, False, 12):
            found = subject.outcomes(propagator, layouts)
            for outcome in [] if isinstance(found, Refusal) else found:
                held = (*layouts, *outcome.outputs)
                if _is_judged(subject, held):
                    yield _asked(call, subject, layouts, outcome.outputs, made, mesh)


def _is_judged(subject: Subject, held: Sequence[Layout]) -> bool:
    """Whether a rank is called as the whole is, on parts that are even."""
    node, values = subject.node
    pairs = zip(held, values, strict=True)
    even = all(h.dim is None or (h.is_plain and v.shape[h.dim] % _RANKS == 0) for h, v in pairs)
    return even and local_arguments(subject, held) == (node.arguments, node.keywords)


def _asked(
    call: Call,
    subject: Subject,
    layouts: Sequence[Layout],
    outputs: Sequence[Layout],
    made: list[torch.Tensor],
    mesh: DeviceMesh,
) -> tuple[str, bool | None, str]:
    placements: Any = tuple(h.placement for h in layouts), tuple(h.placement for h in outputs)
    truth = made if len(made) > 1 else made[0]
    with validation.LocalTensorMode(frozenset(range(_RANKS))):
        valid, reason = validation.validate_aten_combination(
            call.operator, call.arguments, call.keywords, truth, placements, _RANKS, mesh
        )
    return f"{call.key} of ({', '.join(map(str, layouts))}) -> ({', '.join(map(str, outputs))})", valid, reason


def test_torch_finds_nothing_wrong_with_what_the_rules_say(mesh: DeviceMesh) -> None:
    counts, wrong = Counter[bool | None](), list[str]()
    for name in QUICK:
        for shown, valid, reason in _verdicts(name, mesh):
            counts[valid] += 1
            wrong += [f"{shown}: {reason}"] if valid is False else []
    assert not wrong, "\n".join(wrong[:20]) + f"\n{len(wrong)} of {counts.total()}"
    assert counts[True] > 150, counts


def test_it_sees_what_is_wrong(mesh: DeviceMesh) -> None:
    x = torch.rand(4, 6, dtype=torch.float64)
    call = Call(torch.ops.aten.mul.Tensor, (x, x + 1), {})
    subject = Subject(call)
    assert _asked(call, subject, (PARTIAL, PARTIAL), (PARTIAL,), [x * (x + 1)], mesh)[1] is False
    assert _asked(call, subject, (sharded(1),) * 2, (sharded(1),), [x * (x + 1)], mesh)[1] is True

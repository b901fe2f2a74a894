"""What users do with state, for each layout: whole, in stock order and bit-equal, or refused. See `cells.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.cells import CELLS, run_cells
from tests.checkpoint.subjects import SUBJECTS
from tests.marking import slow_but
from tests.runtime.world import world

pytestmark = pytest.mark.processes

# torch has no rule for it on DTensors; with a packed parameter among them, it isn't asked.
OF_TORCH = {"SGD fused": "NotImplementedError: Operator aten._fused_sgd_.default"}
SHAPES = ((1,), (2,), (4,), (2, 2))
SOME = [
    "values", "gradients", "AdamW foreach", "clip", "load stock", "get full", "set model broadcast",
    "set optimizer full",
]  # fmt: skip


def outcomes(name: str, shape: tuple[int, ...], cells: list[str], folder: Path) -> dict[str, str]:
    """What is wrong with which cell."""
    size = shape[0] * (shape[1] if len(shape) > 1 else 1)
    found = world(size).run(run_cells, name, shape, cells, str(folder), seconds=1200)[0]
    return {cell: text for cell, text in found.items() if text and not text.startswith(OF_TORCH.get(cell, "\0"))}


@pytest.mark.parametrize(
    ("name", "shape"),
    slow_but([("uneven", (4,))], [("shared in packs", (4,)), ("uneven", (4,)), ("heads in packs", (4,))]),
    ids=str,
)
def test_a_state_is_the_unsharded_models(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    assert not outcomes(name, shape, SOME, tmp_path)


@pytest.mark.parametrize("name", ["packs"])
def test_a_distributed_checkpoint_is_read_on_another_mesh(name: str, tmp_path: Path) -> None:
    assert not outcomes(name, (4,), ["save", "read"], tmp_path)
    assert not outcomes(name, (2, 2), ["read"], tmp_path)


SLOW = [("packs", (2, 2)), ("uneven", (4,))]
ALL = [
    pytest.param(name, shape, marks=pytest.mark.slow if (name, shape) in SLOW else pytest.mark.sweep)
    for name in SUBJECTS
    for shape in SHAPES
]


@pytest.mark.parametrize(("name", "shape"), ALL, ids=str)
def test_every_use_of_every_layout(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    assert not outcomes(name, shape, list(CELLS), tmp_path)


@pytest.mark.parametrize(("name", "shape"), ALL, ids=str)
def test_a_distributed_checkpoint_is_read_on_every_other_mesh(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    assert not outcomes(name, shape, ["save"], tmp_path)
    for other in SHAPES:
        assert not outcomes(name, other, ["read"], tmp_path), other

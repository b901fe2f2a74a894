"""The registry's names are torch's, its roles are those that passes ask for, and dim maps hold in numbers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rules.calls import FOURIER, SHAPED, Call, calls_of, resolve
from tests.rules.sweep import spellings
from tests.rules.test_audit import QUICK
from tpplan.ops.dim_map import dim_map, is_sized, order_of, size_argument
from tpplan.ops.registry import ROLES, TABLE, has_role

PACKAGE = Path(__file__).parents[2] / "src" / "tpplan"
KNOWN = frozenset(role for roles in ROLES.values() for role in roles)
aten = torch.ops.aten


def _asked_for() -> Iterator[tuple[str, str]]:
    """The roles that passes ask for, with the file: in the call, or in a constant of the file that is passed."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
        for node in ast.walk(tree):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or called not in ("is_a", "has_role"):
                continue
            given = node.args[1:] if called == "has_role" else node.args
            held = [constants.get(ast.unparse(a.value)) if isinstance(a, ast.Starred) else a for a in given]
            texts = (n for a in held if a is not None for n in ast.walk(a) if isinstance(n, ast.Constant))
            yield from ((n.value, path.name) for n in texts if isinstance(n.value, str))


def test_passes_ask_for_roles_that_there_are() -> None:
    assert {(role, file) for role, file in _asked_for() if role not in KNOWN} == set()


def test_no_role_goes_unasked() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "registry.py"]
    asked = {role for role, _ in _asked_for()}
    assert {role for role in KNOWN - asked if not any(f'"{role}"' in text for text in texts)} == set()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", sorted({*ROLES, *TABLE}))
def test_every_name_is_an_operator_of_torch(name: str) -> None:
    assert str(resolve(name)) == name


def _with_dim_maps() -> Iterator[tuple[Call, tuple[int | None, ...]]]:
    torch.manual_seed(0)
    seen: set[str] = set()
    for name in (*QUICK, *FOURIER, *SHAPED, "nn.functional.interpolate.nearest", "nn.functional.pad.reflect", "slice"):
        for call in (held for made in calls_of(name, 3) for held in spellings(made)):
            first = call.arguments[0] if call.arguments else None
            if call.key in seen or not isinstance(first, torch.Tensor) or call.operator._schema.is_mutable:
                continue
            seen.add(call.key)
            try:
                made = call.operator(*call.arguments, **call.keywords)
            except (RuntimeError, IndexError, ValueError, TypeError):
                continue
            result = made[0] if isinstance(made, (tuple, list)) else made
            found = dim_map(call.operator, call.arguments, tuple(first.shape), tuple(result.shape))
            if found is not None:
                yield call, found


def _rotated(call: Call, dim: int) -> Any:
    """What comes of the first operand with the entries of a dim moved on by one."""
    first, *others = call.arguments
    made = call.operator(first.roll(1, dim), *others, **call.keywords)
    return made[0] if isinstance(made, (tuple, list)) else made


def test_a_dim_that_is_kept_has_the_operands_entries_in_their_order() -> None:
    """Where an operand's entries are moved on along a dim, so are the result's along its dim, and no others."""
    tried: set[str] = set()
    for call, found in _with_dim_maps():
        # Statistics and weights by channel, and grids, belong to places of the dim.
        if has_role(call.name, "batch norm", "convolution", "sampling"):
            continue
        made = call.operator(*call.arguments, **call.keywords)
        result = made[0] if isinstance(made, (tuple, list)) else made
        assert len(found) == result.dim(), call.key
        for place, dim in enumerate(found):
            if dim is not None:
                assert result.shape[place] == call.arguments[0].shape[dim], call.key
                torch.testing.assert_close(
                    _rotated(call, dim), result.roll(1, place), equal_nan=True, msg=f"dim {dim} of {call.key}"
                )
                tried.add(call.name)
    assert len(tried) > 30, sorted(tried)


@pytest.mark.parametrize(
    ("operator", "arguments", "order"),
    [
        (aten.transpose.int, (None, 0, -1), [2, 1, 0]),
        (aten.permute.default, (None, (1, -1, 0)), [1, 2, 0]),
        (aten.mT.default, (None,), [0, 2, 1]),
    ],
    ids=str,
)
def test_the_order_of_a_transposition(operator: Any, arguments: tuple[Any, ...], order: list[int]) -> None:
    assert order_of(operator, arguments, 3) == order


def test_which_argument_is_a_size_is_read_off_the_schema() -> None:
    operators = (aten.view.default, aten.zeros.default, aten.split_with_sizes.default, aten.unfold.default)
    assert [size_argument(held) for held in operators] == [1, 0, 1, None]
    # Strides go with the sizes of the first, and the second changes a tensor that is there.
    assert [is_sized(held) for held in (aten.as_strided.default, aten.resize_.default, aten.full.default)] == [
        False, False, True,
    ]  # fmt: skip

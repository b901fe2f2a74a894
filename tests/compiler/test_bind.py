"""Rules bind to modules, and modules' styles to the layouts of their parameters."""

from __future__ import annotations

import pytest
from torch import nn

import tpplan
from tests.compiler.toys import MLP, Attention, Block, Mlp, bound, plan_of
from tpplan.compiler.bind.bind import bind
from tpplan.compiler.ir.layout import REPLICATED, sharded
from tpplan.plan import Style


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight


def test_a_style_gives_each_parameter_its_layout() -> None:
    binding = bound(Mlp(), MLP)
    assert binding.parameters == {
        "up.weight": sharded(0),
        "up.bias": sharded(0),
        "down.weight": sharded(1),
        "down.bias": REPLICATED,
    }
    assert binding.owners.keys() == {"up.weight", "up.bias", "down.weight"}
    assert binding.modules["down"].style is Style.ROWWISE


def test_a_module_with_style_none_has_no_rule() -> None:
    binding = bound(Mlp(), {"*": "colwise", "down": "none"})
    assert list(binding.modules) == ["up"]


@pytest.mark.parametrize("rules", [{"embed": "vocab"}, {"head": "colwise"}, {"embed": "vocab", "head": "colwise"}])
def test_a_tied_parameter_has_one_layout_under_all_its_names(rules: dict[str, str]) -> None:
    binding = bound(Tied(), rules)
    assert binding.parameters == {"embed.weight": sharded(0), "head.weight": sharded(0)}


def test_a_tied_parameter_that_two_rules_split_differently_is_a_conflict() -> None:
    _, findings = bind(Tied(), plan_of({"embed": "vocab", "head": "rowwise"}), 2)
    assert [finding.code for finding in findings] == ["TP109"]


def test_a_shared_module_is_bound_under_its_first_name() -> None:
    model = Block(Mlp())
    model.again = model.body  # pyright: ignore
    binding = bound(model, {"again.up": "colwise", "again.down": "rowwise"})
    assert set(binding.modules) == {"body.up", "body.down"}


@pytest.mark.parametrize(
    ("rules", "size", "code"),
    [
        ({"norm": "colwise"}, 2, "TP101"),
        ({"body": "rowwise"}, 2, "TP101"),
        ({"body.q": "vocab"}, 2, "TP101"),
        ({"body.x": "rowwise"}, 2, "TP012"),
    ],
)
def test_a_rule_that_does_not_fit_its_module_is_a_finding(rules: dict[str, str], size: int, code: str) -> None:
    _, findings = bind(Block(Attention()), plan_of(rules), size)
    assert [finding.code for finding in findings] == [code]
    assert findings[0].help


@pytest.mark.parametrize("setting", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_that_looks_at_rows_of_other_ranks_is_unsupported(setting: dict[str, object]) -> None:
    model = nn.Sequential(nn.Embedding(32, 16, **setting))  # pyright: ignore
    _, findings = bind(model, plan_of({"0": "vocab"}), 2)
    assert [finding.code for finding in findings] == ["TP112"]


def test_the_same_mistake_on_many_modules_is_reported_once() -> None:
    model = nn.Sequential(*(Block(Mlp()) for _ in range(5)))
    plan = tpplan.load_plan('version: 1\nmodules:\n  "*.norm": colwise\n')
    _, findings = bind(model, plan, 2)
    (finding,) = findings
    assert "the same holds for 4 more" in finding.notes


def test_a_subclass_with_a_forward_of_its_own_is_no_linear() -> None:
    class Rectified(nn.Linear):
        def forward(self, input: object) -> object:  # pyright: ignore
            return super().forward(input).relu()  # pyright: ignore

    _, findings = bind(nn.Sequential(Rectified(16, 16)), plan_of({"*": "colwise"}), 2)
    assert [finding.code for finding in findings] == ["TP101"]

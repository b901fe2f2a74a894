"""A diagnostic names the one cause that is present, the line of the model, and one way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import tpplan
from tests.compiler import small_models as toys
from tpplan.plan import Diagnostic

SAMPLE = (torch.randn(2, 4, 16),)
IDS = (torch.zeros(2, 4, dtype=torch.long),)
SPLIT = {"up": "colwise", "down": "rowwise"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x, self.down(self.up(x).relu()))

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return y


def refusal(model: nn.Module, rules: dict[str, object], inputs: tuple[Tensor, ...] = SAMPLE, tp: int = 2) -> Diagnostic:
    with pytest.raises(tpplan.CompileError) as raised:
        tpplan.compile_plan(model, {"version": 1, "modules": rules}, tp, inputs)
    (found,) = raised.value.diagnostics
    return found


FOLDED = '`torch.nn.utils.parametrize.remove_parametrizations({0}, "weight")`'
COMPUTED = [
    (parametrizations.spectral_norm, "parametrization `_SpectralNorm`", FOLDED),
    (parametrizations.orthogonal, "parametrization `_Orthogonal`", FOLDED),
    (weight_norm, "hook `WeightNorm`", "`torch.nn.utils.remove_weight_norm({0})`"),
    (spectral_norm, "hook `SpectralNorm`", "`torch.nn.utils.remove_spectral_norm({0})`"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize(("norm", "what", "removed"), COMPUTED)
def test_a_weight_that_is_computed_is_no_parameter_to_split(norm, what, removed, name):
    model = Mlp()
    norm(getattr(model, name))
    found = refusal(model, SPLIT)  # pyright: ignore
    assert (found.code, found.subject) == ("TP112", name)
    assert found.message == (
        f"`{name}.weight` isn't a parameter: the {what} computes it in each forward, and `{SPLIT[name]}` has "
        "nothing to split"
    )
    assert found.help == (
        f"turn it into a plain parameter first, by {removed.format(name)}, or remove the rule, so that `{name}` stays "
        "whole"
    )


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ({"max_norm": 2.5}, "has `max_norm=2.5`: a lookup rewrites the rows that it reads"),
        (
            {"scale_grad_by_freq": True},
            "has `scale_grad_by_freq=True`: its gradient divides by how often each id occurs",
        ),
        ({"sparse": True}, "has `sparse=True`: its gradient is a sparse tensor"),
    ],
)
def test_an_embedding_that_cannot_be_split_says_for_which_option(option, what):
    found = refusal(nn.ModuleDict({"table": nn.Embedding(32, 16, **option)}), {"table": "vocab"}, IDS)
    assert found.code == "TP112"
    assert found.message == f"`table` {what}, which isn't supported for a table that is split"


PINNED = [
    ({"up": "colwise", "down": {"style": "rowwise", "input": "replicate"}},
     "`down` is `rowwise`, so each rank multiplies its own part of the input's features, but `input: replicate` gives "
     "it all of them", "remove the pin, or write `input: shard`"),
    ({"up": {"style": "colwise", "input": "shard"}, "down": "rowwise"},
     "`up` is `colwise`, so each rank multiplies all of the input's features, but `input: shard` gives it only a part "
     "of them", "remove the pin, or make `up` `rowwise`"),
    ({"up": "colwise", "down": {"style": "rowwise", "output": "shard"}},
     "the result of `down`, of shape [2, 4, 16], can't be `shard`: a bias of all 16 features is added to it",
     "remove `output`, and the compiler finds a layout"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "message", "way_out"), PINNED)
def test_a_pin_says_what_it_requires(rules, message, way_out):
    found = refusal(Mlp(), rules)
    assert (found.code, found.message, found.help) == ("TP114", message, way_out)


def test_a_pin_along_the_sequence_says_how_long_that_is():
    rules = {"up": {"style": "colwise", "output": "sequence"}, "down": "rowwise"}
    found = refusal(Mlp(), rules, (torch.randn(2, 5, 16),))  # pyright: ignore
    assert found.message == (
        "the result of `up`, of shape [2, 5, 32], can't be `sequence`: dim 1 is the sequence, and 2 ranks can't split "
        "its 5 positions evenly"
    )


class Item(Mlp):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return y * y.sum().item()  # here


class ToList(Mlp):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return y * y.argmax(-1).tolist()[0][0]  # here


class ToNumpy(Mlp):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return y * float(y.detach().numpy().mean())  # here


def line_of(kind: type[nn.Module]) -> str:
    """The line that is marked in a class."""
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    return f"{__file__}:{next(i for i in range(start, len(lines)) if lines[i].endswith('# here')) + 1}"


@pytest.mark.parametrize("kind", [Item, ToList, ToNumpy])
def test_a_read_of_numbers_is_named_with_its_line(kind):
    found = refusal(nn.Sequential(kind()), {"0.up": "colwise", "0.down": "rowwise"})
    assert (found.code, found.subject) == ("TP110", "0")
    assert found.message == "`0` reads a tensor's values, and a capture has none"
    assert found.notes == (f"in `0`, at {line_of(kind)}",)
    assert "torch.where" in (found.help or "")


class Skips(Mlp):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return x if self.training and torch.rand(1).item() < 0.5 else y  # here


def test_a_model_that_is_captured_in_evaluation_alone_says_so():
    plan = {"version": 1, "modules": {"0.up": "colwise", "0.down": "rowwise"}}
    model = nn.Sequential(Skips())
    (found,) = tpplan.compile_plan(model, plan, 2, SAMPLE).diagnostics
    assert (found.code, found.subject, str(found.severity)) == ("TP153", "0", "warning")
    assert found.message.startswith("this program is for evaluation: in training, `0` turns a random number of torch's")
    assert found.notes == (f"in `0`, at {line_of(Skips)}",) and "without `.item()`" in (found.help or "")
    assert not tpplan.compile_plan(model.eval(), plan, 2, SAMPLE).diagnostics


class Cond(Mlp):
    def after(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda z: z, lambda z: -z, (y,))  # here


def test_an_operator_of_higher_order_is_named():
    found = refusal(Cond(), SPLIT)  # pyright: ignore
    assert found.message == "the model calls a higher-order operator such as `torch.cond`, which can't be captured"
    assert found.notes == (f"in the model, at {line_of(Cond)}",)


def test_what_follows_from_a_write_in_place_is_not_reported():
    rules = {"up": {"style": "colwise", "output": "shard"}}
    assert refusal(toys.WritesThroughAView(), rules, toys.activations()).code == "TP113"  # pyright: ignore


def test_two_calls_of_a_module_are_told_apart_by_their_layouts():
    found = refusal(toys.Shared(), {"up": "colwise", "down": "rowwise"}, toys.activations())
    assert found.message == (
        "`down` is called several times, and its calls need different reshards: argument input comes as S(2) in call 1 "
        "and as P in call 2"
    )


def no_plan(model: nn.Module, tp: int, inputs: tuple[Tensor, ...] = SAMPLE) -> str:
    with pytest.raises(tpplan.CompileError) as raised:
        tpplan.suggest_plan(model, tp, inputs=inputs)
    (found,) = raised.value.diagnostics
    assert found.code == "TP123"
    return found.help or ""


def test_other_ranks_are_advised_where_they_help():
    assert no_plan(nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 16)), 32).startswith("try fewer ranks")
    assert no_plan(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), 2).startswith("no number of ranks changes that")
    image = (torch.randn(2, 3, 8, 8),)
    assert "use data parallelism" in no_plan(nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.ReLU()), 2, image)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(16, 32, bias=False) for _ in range(2))
        self.w2 = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


@pytest.mark.parametrize(
    ("rules", "forgotten"),
    [
        ({"w1": "colwise", "w2": "rowwise"}, "w3"),
        ({"w3": "colwise", "w2": "rowwise"}, "w1"),
        ({"w1": "colwise", "w3": "colwise"}, "w2"),
    ],
)
def test_a_layer_that_the_plan_forgot_is_named(rules, forgotten):
    program = tpplan.compile_plan(Gated(), {"version": 1, "modules": rules}, 2, SAMPLE)
    found = next(d for d in program.diagnostics if d.code == "TP104")
    assert f"`{forgotten}`" in f"{found.message} {found.help}"

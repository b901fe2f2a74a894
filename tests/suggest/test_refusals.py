"""A model that can't be sharded is refused in one finding, alike by all that compile it, and its help works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpplan
from tests.runtime.simulated import plan_of
from tpplan.calls.inference_cost import inference
from tpplan.parity import ParityReport
from tpplan.plan import CompileError, Diagnostic

WIDTH, HEADS, LENGTH = 32, 4, 6


class Unusual(dict[str, object]):
    """A registry that imports what it is asked for, as transformers' are."""

    def values(self) -> Any:
        raise ValueError("it isn't installed")


REGISTRY = Unusual(made=object())


def x_of(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, LENGTH, WIDTH)), dtype=torch.float64)


def refusal(run: Callable[..., Any], *arguments: Any, **keywords: Any) -> Diagnostic:
    with pytest.raises(CompileError) as raised:
        run(*arguments, **keywords)
    (finding,) = raised.value.diagnostics
    return finding


def suggested(model: nn.Module, call: tuple[Any, ...], tp: int = 2) -> ParityReport:
    return tpplan.verify(model, tpplan.suggest_plan(model, tp, inputs=call), tp, call)


class Weighing(nn.Module):
    """Scores for all heads, of which a rank takes those of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = HEADS

    def flat(self, scores: Tensor) -> Tensor:
        return scores.view(-1, LENGTH, LENGTH)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        v = self.v(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2).reshape(-1, LENGTH, WIDTH // HEADS)
        mixed = torch.bmm(self.flat(scores), v).view(-1, self.heads, LENGTH, WIDTH // HEADS)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Reshaping(Weighing):
    def flat(self, scores: Tensor) -> Tensor:
        return scores.reshape(-1, LENGTH, LENGTH)


class Weighed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        return x + self.inner(x, scores)


def test_a_view_that_a_rank_cannot_make_is_one_finding_for_all_that_compile() -> None:
    model, call = Weighed(Weighing()).double(), (x_of(), x_of(3, HEADS, LENGTH, LENGTH))
    plan = plan_of({"inner.v": "colwise", "inner.o": "rowwise"})
    finding = refusal(tpplan.compile_plan, model, plan, 2, call)
    assert finding.code == "TP136" and finding.notes[0].startswith("in `inner`, at ")
    assert refusal(tpplan.verify, model, plan, 2, call) == finding
    assert refusal(inference, model, plan, 2, call, {}) == finding
    proposed = refusal(tpplan.suggest_plan, model, 2, inputs=call)
    assert proposed.code == "TP123" and any(finding.message in note for note in proposed.notes)
    assert ".reshape" in (finding.help or "") and "as its finding says" in (proposed.help or "")
    assert suggested(Weighed(Reshaping()).double(), call).ok


class Scoring(nn.Module):
    """As `Weighing`, with sizes by number and scores of its own, so that it runs from its record."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(3, LENGTH, 4, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = self.drop((q @ k.transpose(2, 3)).softmax(-1))
        return self.o((scores @ v).transpose(1, 2).reshape(3, LENGTH, WIDTH))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_record_views_a_slice_with_gaps(tp: int) -> None:
    plan = plan_of({"0.v": "colwise", "0.o": "rowwise"})
    assert tpplan.verify(nn.Sequential(Scoring()).double(), plan, tp, (x_of(),)).ok


class Replacing(nn.Module):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.act: nn.Module = nn.ReLU()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or isinstance(self.act, nn.ReLU):
            self.act = nn.GELU()
        return self.down(self.act(self.up(x)))


def test_a_replaced_module_is_told_with_its_line() -> None:
    for always in (True, False):
        finding = refusal(tpplan.suggest_plan, Replacing(always), 2, inputs=(x_of(),))
        assert finding.code == "TP110" and "replaces the module `act`" in finding.message
        assert "in the model, at " in finding.notes[0] and "test_refusals.py" in finding.notes[0]
    called = Replacing(False).double()
    called(x_of())
    assert suggested(called, (x_of(),)).ok


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.LazyLinear(64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_lazy_modules_are_called_first() -> None:
    model = Lazy().double()
    finding = refusal(tpplan.suggest_plan, model, 2, inputs=(x_of(),))
    assert finding.code == "TP110" and "`up.weight` has no shape yet" in finding.message
    model(x_of())
    assert suggested(model, (x_of(),)).ok


class Mapped(Lazy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: nn.Linear.forward(self.down, self.up(row).relu()))(x)


def test_transforms_of_functions_are_told() -> None:
    model = Mapped().double()
    model.up(x_of())
    finding = refusal(tpplan.suggest_plan, model, 2, inputs=(x_of(),))
    assert "inside of a transform of `torch.func`" in finding.message and "whole batch" in (finding.help or "")


class Seeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seed = torch.seed()
        return self.down(self.up(x).relu())


def test_a_number_that_is_new_each_time_is_told() -> None:
    finding = refusal(tpplan.suggest_plan, Seeding(), 2, inputs=(x_of(),))
    assert finding.code == "TP107" and "another number in `seed` each time" in finding.message
    assert "torch.seed()" in (finding.help or "")


class Rotating(nn.Module):
    """An outermost body with numbers of heads in it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x).view(*x.shape[:2], 4, 8).tanh().flatten(2))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_an_outermost_body_with_sizes_by_number_is_called_from_around() -> None:
    finding = refusal(tpplan.suggest_plan, Rotating().double(), 2, inputs=(x_of(),))
    assert "call `Rotating` from a module around it whose `forward` names its arguments" in (finding.help or "")
    assert suggested(Around(Rotating()).double(), (x_of(),)).ok


def test_what_is_around_a_model_is_looked_at_without_asking_it() -> None:
    assert REGISTRY and suggested(Reading().double(), (x_of(),)).ok


class Reading(nn.Module):
    """Keeps such a registry, beside the one in this file."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.registry = REGISTRY

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def packing(x: Tensor) -> Tensor:
    lengths = torch.full(x.shape[:1], x.shape[1])
    return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data


def counting(x: Tensor) -> Tensor:
    return torch.histogram(x, 5).hist


class Ending(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.end = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.down(self.up(x).relu()))


@pytest.mark.parametrize(
    ("end", "told", "way_out"),
    [
        (packing, "the model packs sequences", "padded batch"),
        (counting, "calls `aten::histogram", "outside of the model"),
    ],
)
def test_what_cannot_run_on_shapes_is_told(end: Callable[[Tensor], Tensor], told: str, way_out: str) -> None:
    finding = refusal(tpplan.suggest_plan, Ending(end).double(), 2, inputs=(x_of(),))
    assert finding.code == "TP110" and told in finding.message and way_out in (finding.help or "")


def test_a_scripted_module_is_told() -> None:
    for model in (torch.jit.script(nn.Linear(WIDTH, 64)), nn.Sequential(torch.jit.script(nn.Linear(WIDTH, 64)))):
        assert "compiled by TorchScript" in refusal(tpplan.suggest_plan, model, 2, inputs=(x_of(),)).message


def test_text_may_have_a_format() -> None:
    assert suggested(Ending(lambda x: x if f"{x.mean():.3f}" else -x).double(), (x_of(),)).ok


class Named(nn.Module):
    """Picks a layer by text that is made of a number."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.form = nn.ModuleDict({name: Ending(torch.sin) for name in ("0", "1")}), form

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.layers[format(number, self.form)](x)


@pytest.mark.parametrize(("form", "number"), [("", torch.tensor(1)), (".0f", torch.tensor(1.0))])
def test_text_names_no_layer(form: str, number: Tensor) -> None:
    assert refusal(tpplan.suggest_plan, Named(form).double(), 2, inputs=(x_of(), number)).code == "TP110"

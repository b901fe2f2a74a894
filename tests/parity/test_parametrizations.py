"""Weights that parametrizations compute: their parts are split with them, or stay whole, or the rule is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import tpplan
from tests.runtime.world import Member, world
from tpplan.compiler.ir.layout import Collective
from tpplan.compiler.ir.program import Program
from tpplan.plan import CompileError
from tpplan.report.program import render_program

INNER, WIDTH, RANK = 24, 16, 3
COLUMN, ROW, GATHERED = "colwise", "rowwise", {"style": "colwise", "output": "replicate"}


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return functional.softplus(weight)


class Masked(nn.Module):
    """A buffer of the weight's shape."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(weight.shape) < 0.5).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class Scaled(nn.Module):
    """A parameter for each entry of one dim."""

    def __init__(self, weight: Tensor, dim: int) -> None:
        super().__init__()
        self.dim, self.scale = dim, nn.Parameter(torch.rand(weight.shape[dim]) + 0.5)

    def forward(self, weight: Tensor) -> Tensor:
        shape = [1] * weight.dim()
        shape[self.dim] = -1
        return weight * self.scale.view(shape).exp()


class LowRank(nn.Module):
    """An update of which the parts are other parameters."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        out, inputs = weight.shape
        self.a, self.b = nn.Parameter(torch.randn(RANK, inputs) / 3), nn.Parameter(torch.randn(out, RANK) / 3)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.5 * (self.b @ self.a)


class Rotated(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(weight.shape[1], weight.shape[1]) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ self.turn


class Centred(nn.Module):
    """Rows without their means, as in weight standardization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(1, keepdim=True)


class Bounded(nn.Module):
    """Entries that are weighed by all of their row."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / (1 + weight.abs().sum(1, keepdim=True))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Lengths(nn.Module):
    """Weight norm as a user writes it, with a right inverse."""

    def forward(self, lengths: Tensor, directions: Tensor) -> Tensor:
        return directions * (lengths / directions.pow(2).sum(1, keepdim=True).sqrt())

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.norm(dim=1, keepdim=True), weight


def by(make: Any, *more: Any) -> Any:
    def wrapped(module: nn.Module) -> nn.Module:
        weight: Any = module.weight
        register_parametrization(
            module, "weight", make(weight, *more) if more or make.__init__ is not nn.Module.__init__ else make()
        )
        return module

    return wrapped


def normed(module: nn.Module, dim: int | None = 0) -> nn.Module:
    return parametrizations.weight_norm(module, dim=dim)  # pyright: ignore


def both(*steps: Any) -> Any:
    def wrapped(module: nn.Module) -> nn.Module:
        for step in steps:
            module = step(module)
        return module

    return wrapped


WAYS: dict[str, Any] = {
    "rows normed": normed,
    "columns normed": lambda m: normed(m, 1),  # pyright: ignore
    "normed as a whole": lambda m: normed(m, None),  # pyright: ignore
    "positive": by(Positive),
    "masked": by(Masked),
    "rows scaled": by(Scaled, 0),
    "columns scaled": by(Scaled, 1),
    "low rank": by(LowRank),
    "rotated": by(Rotated),
    "centred": by(Centred),
    "bounded": by(Bounded),
    "lengths": by(Lengths),
    "positive, then scaled": both(by(Positive), by(Scaled, 0)),
    "low rank, then masked": both(by(LowRank), by(Masked)),
    "normed, then masked": both(normed, by(Masked)),
}


class Pair(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).sin())


def made(way: Any, other: Any = lambda m: m) -> nn.Module:  # pyright: ignore
    torch.manual_seed(1)
    return Pair(other(nn.Linear(WIDTH, INNER)), way(nn.Linear(INNER, WIDTH))).double()


def columns(way: Any) -> nn.Module:
    torch.manual_seed(1)
    return Pair(way(nn.Linear(WIDTH, INNER)), nn.Linear(INNER, WIDTH)).double()


def x_of(length: int = 6) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)


PLAN: Any = {"version": 1, "modules": {"up": COLUMN, "down": ROW}}


def layouts(program: Program, layer: str) -> dict[str, str]:
    start = f"{layer}.parametrizations.weight."
    return {p.name.removeprefix(start): str(p.layout) for p in program.parameters if p.name.startswith(start)}


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [made, columns], ids=["rowwise", "colwise"])
def test_parts_follow_the_weight(build: Any, way: str, tp: int) -> None:
    report = tpplan.verify(build(WAYS[way]), PLAN, tp, (x_of(),))
    assert report.ok, report.problems
    assert report.collectives == report.predicted


def test_what_is_split_and_what_stays_whole() -> None:
    def parts(build: Any, way: str) -> dict[str, str]:
        return layouts(tpplan.compile_plan(build(WAYS[way]), PLAN, 2, (x_of(),)), "up" if build is columns else "down")

    assert parts(columns, "rows normed") == {"original0": "S(0)", "original1": "S(0)"}
    assert parts(made, "rows normed") == {"original0": "R", "original1": "S(1)"}
    assert parts(columns, "columns normed") == {"original0": "R", "original1": "S(0)"}
    assert parts(columns, "low rank") == {"original": "S(0)", "0.a": "R", "0.b": "S(0)"}
    assert parts(made, "low rank") == {"original": "S(1)", "0.a": "S(1)", "0.b": "R"}
    assert parts(made, "rotated") == {"original": "R", "0.turn": "S(1)"}
    assert parts(columns, "rows scaled") == {"original": "S(0)", "0.scale": "S(0)"}
    assert parts(made, "rows scaled") == {"original": "S(1)", "0.scale": "R"}


def inner_moves(program: Program) -> list[tuple[str, str, tuple[int, ...], Collective, Collective]]:
    return [
        (m.name, move.path[0] if move.path else "", move.shape, move.forward.collective, move.backward.collective)
        for m in program.modules
        for move in m.inner
    ]  # pyright: ignore


def test_lengths_are_summed_and_no_weight_is_gathered() -> None:
    """Though the weight of a layer with many rows may be less than what it makes of them."""
    with torch.device("meta"):
        model = Pair(nn.Linear(WIDTH, INNER), normed(nn.Linear(INNER, WIDTH)))
        x = torch.empty(8, 4096, WIDTH, requires_grad=True)
    program = tpplan.compile_plan(model, PLAN, 4, (x,))
    moved = [move for module in program.modules for move in (*module.entries, *module.inner, *module.exits)]
    assert not any(move.shape[:1] == (WIDTH,) and WIDTH * INNER in move.shape for move in moved)
    assert {module.name for module in program.modules if module.inner} == {"down.parametrizations.weight.0"}
    assert "mid" in render_program(program)
    assert "TP147" in {finding.code for finding in program.diagnostics}


@pytest.mark.parametrize("way", ["rows normed", "low rank", "columns scaled", "bounded"])
@pytest.mark.parametrize("build", [made, columns], ids=["rowwise", "colwise"])
def test_beside_a_split_sequence(build: Any, way: str) -> None:
    plan = {"version": 1, "modules": {**PLAN["modules"], "norm": "sequence"}}
    report = tpplan.verify(build(WAYS[way]), plan, 2, (x_of(8),))
    assert report.ok, report.problems


CONVOLUTIONS: dict[str, Any] = {
    "one dim": (nn.Conv1d, (2, WIDTH, 9)),
    "two dims": (nn.Conv2d, (2, WIDTH, 5, 6)),
    "transposed": (nn.ConvTranspose1d, (2, WIDTH, 9)),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("way", ["rows normed", "columns normed", "positive", "rows scaled", "masked"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(kind: str, way: str, tp: int) -> None:
    torch.manual_seed(1)
    convolution, shape = CONVOLUTIONS[kind]
    up, down = (WAYS[way](convolution(*sizes, 3)) for sizes in ((WIDTH, INNER), (INNER, WIDTH)))
    model = nn.Sequential(up, nn.Tanh(), down).double()
    plan = {"version": 1, "modules": {"0": COLUMN, "2": ROW}}
    report = tpplan.verify(model, plan, tp, (torch.randn(shape, dtype=torch.float64, requires_grad=True),))
    assert report.ok, report.problems


REFUSED: dict[str, Any] = {
    "symmetric": (by(Symmetric), "Symmetric"),
    "spectral": (parametrizations.spectral_norm, "_SpectralNorm"),
    "orthogonal": (parametrizations.orthogonal, "_Orthogonal"),
}


@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("way", REFUSED)
def test_what_can_not_be_split_is_refused_once_with_a_remedy(way: str, name: str) -> None:
    wrap, kind = REFUSED[way]
    torch.manual_seed(1)
    model = nn.Sequential()
    model.up, model.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    wrap(getattr(model, name))
    with pytest.raises(CompileError) as caught:
        tpplan.compile_plan(model, PLAN, 2, (x_of(),))
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.subject) == ("TP112", name) and f"`{kind}`" in finding.message
    torch.nn.utils.parametrize.remove_parametrizations(getattr(model, name), "weight")  # as the help says
    tpplan.compile_plan(model, PLAN, 2, (x_of(),))


def _trained(member: Member, watched: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        for build in (made, columns):
            model, x = build(way), x_of()
            if member.size > 1:
                with pytest.MonkeyPatch.context() as patch:
                    if watched:
                        patch.setenv("TPPLAN_DEBUG", "1")
                    model = tpplan.parallelize(model, PLAN, member.mesh(), (x,))
            with torch.no_grad():
                quiet = model(x)
            evaluated = model.eval()(x).detach()
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            state = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t) for n, t in model.state_dict().items()}
            found[f"{name} {build.__name__}"] = {**state, "quiet": quiet, "evaluated": evaluated, "x": x.grad}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "watched"), [(2, False), (3, True), (4, False)])
def test_trainings_on_processes(tp: int, watched: bool) -> None:
    (expected,) = world(1).run(_trained, False)
    for found in world(tp).run(_trained, watched):
        for kind, tensors in expected.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(found[kind][name], tensor, rtol=1e-8, atol=1e-8, msg=f"{kind} {name}")

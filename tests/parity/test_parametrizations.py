"""Weights that parametrizations compute: their parts are split with them, or stay whole, or the rule is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.marking import sweep_but
from tests.runtime.world import Member, world
from tpplan.compiler.ir.program import Program, Reshard
from tpplan.plan import CompileError
from tpplan.report.program_page import render_program

INNER, WIDTH, RANK = 24, 16, 3
COLUMN, ROW, GATHERED = "colwise", "rowwise", {"style": "colwise", "output": "replicate"}


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return functional.softplus(weight)


class Masked(nn.Module):
    """A buffer of the weight's shape."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.mask: Tensor
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


_STYLES = {"rowwise": made, "colwise": columns}
_RUNS = [(way, style, tp) for way in WAYS for style in _STYLES for tp in (2, 3, 4)]


@pytest.mark.parametrize(("way", "style", "tp"), sweep_but(_RUNS[::5], _RUNS))
@pytest.mark.one_in(5)
def test_parts_follow_the_weight(way: str, style: str, tp: int) -> None:
    report = tpplan.verify(_STYLES[style](WAYS[way]), PLAN, tp, (x_of(),))
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


def moved(rules: dict[str, Any]) -> tuple[Program, list[Reshard]]:
    """What ranks exchange of a call with many rows, all of which are more than a weight."""
    with torch.device("meta"):
        model = Pair(*(normed(nn.Linear(*sizes, bias=False)) for sizes in ((WIDTH, INNER), (INNER, WIDTH))))
        x = torch.empty(8, 4096, WIDTH, requires_grad=True)
    program = tpplan.compile_plan(model, {"version": 1, "modules": rules}, 4, (x,))
    return program, [move for module in program.modules for move in (*module.entries, *module.inner, *module.exits)]


def test_lengths_are_summed_and_explained() -> None:
    program, moves = moved(PLAN["modules"])
    assert sorted(move.shape for move in moves if len(move.shape) == 2) == [(WIDTH, 1)] * 2
    assert {module.name for module in program.modules if module.inner} == {"down.parametrizations.weight.0"}
    assert "mid" in render_program(program)
    (finding,) = (finding for finding in program.diagnostics if finding.code == "TP147")
    assert finding.span is not None or "down.parametrizations.weight.0" in finding.message


def test_no_weight_is_gathered() -> None:
    """Though it may be less than what is made by it."""
    _, moves = moved({"up": GATHERED, "down": GATHERED})
    assert moves and all(len(move.shape) == 3 for move in moves)


@pytest.mark.one_in(5)
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
@pytest.mark.one_in(5)
def test_convolutions(kind: str, way: str, tp: int) -> None:
    torch.manual_seed(1)
    convolution, shape = CONVOLUTIONS[kind]
    up, down = (WAYS[way](convolution(*sizes, 3)) for sizes in ((WIDTH, INNER), (INNER, WIDTH)))
    model = nn.Sequential(up, nn.Tanh(), down).double()
    plan = {"version": 1, "modules": {"0": COLUMN, "2": ROW}}
    report = tpplan.verify(model, plan, tp, (torch.randn(shape, dtype=torch.float64, requires_grad=True),))
    assert report.ok, report.problems


class Attention(nn.Module):
    """Heads, of which keys and values have fewer."""

    def __init__(self, way: Any, groups: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (way(nn.Linear(WIDTH, n)) for n in (16, 4 * groups, 4 * groups, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (held.repeat_interleave(q.shape[1] // held.shape[1], 1) for held in (k, v))
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("groups", "tp"), [(4, 2), (4, 3), (2, 4)])
@pytest.mark.parametrize("way", ["rows normed", "low rank", "columns scaled"])
def test_heads(way: str, groups: int, tp: int) -> None:
    torch.manual_seed(1)
    model = Attention(WAYS[way], groups).double()
    report = tpplan.verify(model, {"version": 1, "modules": {"{q,k,v}": COLUMN, "out": ROW}}, tp, (x_of(),))
    assert report.ok, report.problems


class Shared(nn.Module):
    def __init__(self, way: Any, cached: bool) -> None:
        super().__init__()
        self.up, self.down = way(nn.Linear(WIDTH, INNER)), way(nn.Linear(INNER, WIDTH))
        self.around: Any = parametrize.cached if cached else nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            for _ in range(2):
                x = x + self.down(self.up(x).sin())
        return x


@pytest.mark.parametrize("way", ["rows normed", "columns normed", "low rank"])
def test_layers_that_are_called_twice(way: str) -> None:
    torch.manual_seed(1)
    report = tpplan.verify(Shared(WAYS[way], cached=False).double(), PLAN, 2, (x_of(),))
    assert report.ok, report.problems


@pytest.mark.parametrize("way", ["rows normed", "columns normed", "centred", "columns scaled"])
def test_inputs_that_the_axis_does_not_divide(way: str) -> None:
    torch.manual_seed(1)
    model = Pair(*(WAYS[way](nn.Linear(*sizes)) for sizes in ((WIDTH, 20), (20, WIDTH)))).double()
    report = tpplan.verify(model, PLAN, 3, (x_of(),))
    assert report.ok, report.problems


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("casts", [False, True])
def test_narrow_numbers_and_autocast(dtype: torch.dtype, casts: bool) -> None:
    model, x = made(normed, normed).to(dtype), x_of().detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        report = tpplan.verify(model, PLAN, 2, (x,))
    assert report.ok, report.problems


def test_frozen_parts_and_parts_that_the_plan_names() -> None:
    model = made(normed, normed)
    parts: Any = model.get_submodule("down.parametrizations.weight")
    parts.original1.requires_grad_(False)
    report = tpplan.verify(model, PLAN, 2, (x_of(),))
    assert report.ok, report.problems
    named = {"up": COLUMN, "down.parametrizations.weight.original1": ROW, "down.bias": ROW}
    report = tpplan.verify(model, {"version": 1, "modules": named}, 2, (x_of(),))
    assert report.ok, report.problems


@pytest.mark.parametrize("name", ["up", "down"])
def test_biases(name: str) -> None:
    """A bias that is computed can be split with columns; to a sum over the ranks one rank would have to add it."""
    torch.manual_seed(1)
    model = Pair(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)).double()
    register_parametrization(model.get_submodule(name), "bias", Positive())
    if name == "down":
        with pytest.raises(CompileError, match=r"TP112.*`down\.bias`"):
            tpplan.compile_plan(model, PLAN, 2, (x_of(),))
        return
    report = tpplan.verify(model, PLAN, 2, (x_of(),))
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
            state = {n: _whole(t) for n, t in model.state_dict().items()}
            found[f"{name} {build.__name__}"] = {**state, "quiet": quiet, "evaluated": evaluated, "x": x.grad}
    return found


def _used(member: Member) -> dict[str, Any]:
    """What is asked of a model around its forwards, beside compiled and recomputed ones."""
    model: Any = Shared(normed, cached=True)
    x = x_of()
    torch.manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model, own = model.double(), {"alone": torch.ones(2, 6, INNER, dtype=torch.float64)}
    if member.size > 1:
        model = tpplan.parallelize(model, PLAN, member.mesh(), (x,))
    found: dict[str, Any] = {}
    for name in ("eager", "quiet", "recomputed", "compiled"):
        model.zero_grad()
        x.grad = None
        run: Any = torch.compile(model, backend="aot_eager") if name == "compiled" and member.size > 1 else model
        with torch.set_grad_enabled(name != "quiet"):
            result = checkpoint(run, x, use_reentrant=False) if name == "recomputed" else run(x)
        found[name] = result.detach()
        if name != "quiet":
            result.square().sum().backward()
            found |= {f"{name} {n}": _whole(p.grad) for n, p in model.named_parameters()} | {f"{name} x": x.grad}
    found["weight"] = _whole(model.down.weight).detach()
    found["alone"] = _whole(model.down(own["alone"])).detach()
    stock = Shared(normed, cached=True).double()
    stock.load_state_dict({name: _whole(held) for name, held in model.state_dict().items()})
    return found | {"loaded": stock(x).detach()}


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
def test_use_around_forwards() -> None:
    (expected,) = world(1).run(_used)
    for found in world(2).run(_used):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "watched"), [(2, False), (3, True), (4, False)])
@pytest.mark.sweep
def test_trainings_on_processes(tp: int, watched: bool) -> None:
    (expected,) = world(1).run(_trained, False)
    for found in world(tp).run(_trained, watched):
        for kind, tensors in expected.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(found[kind][name], tensor, rtol=1e-8, atol=1e-8, msg=f"{kind} {name}")

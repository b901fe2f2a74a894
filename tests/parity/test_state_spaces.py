"""State-space mixers: depthwise convolutions, scans, and what stands beside their features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import tpplan
from tests.caching import cache_of, passing
from tests.marking import in_thirds
from tpplan.api import suggest_text
from tpplan.calls.guard import CallGuard
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.place import split_norms
from tpplan.compiler.request import Request
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.parity import verify_program
from tpplan.parity.materialise import copy_structure, copy_with_numbers
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.plan import CompileError, load_plan
from tpplan.runtime.lower import lower

WIDTH, HEADS, SIZE, STATE, GROUPS, KERNEL = 24, 8, 6, 5, 4, 4
INNER = HEADS * SIZE
STREAM = (torch.randn(3, 7, WIDTH, requires_grad=True),)


class GatedFirst(nn.Module):
    """The input is gated, then normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INNER))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        wide = x if z is None else x * functional.silu(z)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))


class GatedLast(GatedFirst):
    """The input is normalized, and the result gated; the gate comes first."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(x) * functional.silu(z)


class GatedTwice(GatedFirst):
    """What no formula stands for."""

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        assert z is not None
        return super().forward(x, z) * functional.silu(z)


class Mixer(nn.Module):
    """A scan over time whose projection packs z, x, B, C and Δ, of which B and C belong to groups of heads."""

    def __init__(self, norm: type[nn.Module], groups: int) -> None:
        super().__init__()
        self.inner, self.heads, self.groups, self.window = INNER, HEADS, groups, KERNEL
        self.parts = [INNER, 2 * groups * STATE]
        channels = INNER + 2 * groups * STATE
        self.channels = channels
        self.into = nn.Linear(WIDTH, INNER + channels + HEADS)
        self.conv = nn.Conv1d(channels, channels, KERNEL, groups=channels, padding=KERNEL - 1)
        self.rates, self.skip = nn.Parameter(torch.rand(HEADS, STATE)), nn.Parameter(torch.randn(HEADS))
        self.shift = nn.Parameter(torch.randn(HEADS))
        self.norm, self.out = norm(), nn.Linear(INNER, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, _ = stream.shape
        z, packed, delta = self.into(stream).split([self.inner, self.channels, self.heads], -1)
        packed = functional.silu(self.conv(packed.transpose(1, 2))[..., :length].transpose(1, 2))
        each = (self.channels - self.inner) // 2
        x, b, c = packed.split([self.inner, each, each], -1)
        x = x.view(batch, length, -1, SIZE)
        b, c = (
            t.view(batch, length, self.groups, STATE).repeat_interleave(self.heads // self.groups, 2) for t in (b, c)
        )
        delta = functional.softplus(delta + self.shift)
        decay = torch.exp(-torch.exp(self.rates) * delta[..., None])
        state = torch.zeros(batch, self.heads, SIZE, STATE, dtype=x.dtype, device=x.device)
        found: list[Tensor] = []
        for t in range(length):
            state = state * decay[:, t, :, None] + (delta[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
            found.append((state @ c[:, t, :, :, None])[..., 0] + self.skip[:, None] * x[:, t])
        y = torch.stack(found, 1).reshape(batch, length, -1)
        return self.out(self.norm(z, y) if isinstance(self.norm, GatedLast) else self.norm(y, z))


def plan_for(groups: int) -> dict[str, Any]:
    each = groups * STATE
    five = {"z": INNER, "x": INNER, "b": each, "c": each, "dt": HEADS}
    return {
        "version": 1,
        "modules": {
            "into": {"style": "colwise", "packed": five},
            "conv": {"style": "colwise", "packed": {"x": INNER, "b": each, "c": each}},
            "{rates,skip,shift}": "colwise",
            "out": "rowwise",
        },
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("norm", "groups"), [(GatedFirst, 1), (GatedLast, 1), (GatedFirst, GROUPS)])
def test_every_rank_scans_its_own_heads(norm: type[nn.Module], groups: int, size: int) -> None:
    model = Mixer(norm, groups).eval()
    program = tpplan.compile_plan(model, plan_for(groups), size, STREAM)
    assert program.count_collectives() == {"all-reduce": 5}  # f, f*, the statistic each way, and sums of gradients
    report = verify_program(model, program, (STREAM, {}))
    assert report.ok, report.problems


def test_the_number_of_groups_becomes_local() -> None:
    program = tpplan.compile_plan(Mixer(GatedFirst, GROUPS), plan_for(GROUPS), 2, STREAM)
    (local,) = (m.local_attributes for m in program.modules if m.name == "conv")
    whole = INNER + 2 * GROUPS * STATE
    assert [(a.name, a.whole, a.local) for a in local] == [("groups", whole, whole // 2)]


def test_a_number_that_is_equal_by_chance_stays() -> None:
    """The width of the convolution is that of the groups; nothing in the example's body reads it."""
    assert KERNEL == GROUPS
    program = tpplan.compile_plan(Mixer(GatedFirst, GROUPS), plan_for(GROUPS), 2, STREAM)
    (local,) = (m.local_attributes for m in program.modules if m.name == "")
    assert "groups" in {a.name for a in local}
    assert "window" not in {a.name for a in local}


def test_a_gate_that_no_formula_knows_is_not_taken_for_one() -> None:
    model = Mixer(GatedTwice, 1)
    program = tpplan.compile_plan(model, plan_for(1), 2, STREAM)
    assert all(module.split_norm is None for module in program.modules)
    report = verify_program(model, program, (STREAM, {}))
    assert report.ok, report.problems


def test_a_gate_in_the_wrong_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = split_norms.recognise_gated

    def turned(region: Any) -> Any:
        norm = stock(region)
        return norm if norm is None or norm.gate is None else replace(norm, gate=replace(norm.gate, first=False))

    monkeypatch.setattr(split_norms, "recognise_gated", turned)
    model = Mixer(GatedFirst, 1)
    assert not verify_program(model, tpplan.compile_plan(model, plan_for(1), 2, STREAM), (STREAM, {})).ok


@pytest.mark.parametrize("left_out", ["conv", "{rates,skip,shift}"])
def test_what_stands_beside_split_features_must_be_split(left_out: str) -> None:
    plan = plan_for(GROUPS)
    del plan["modules"][left_out]
    with pytest.raises(CompileError, match="TP107"):
        tpplan.compile_plan(Mixer(GatedFirst, GROUPS), plan, 2, STREAM)


def test_a_convolution_is_a_column_and_in_groups_no_row() -> None:
    call = (torch.randn(2, 8, 5),)
    report = tpplan.verify(nn.Sequential(nn.Conv1d(8, 8, 3)), {"version": 1, "modules": {"0": "colwise"}}, 2, call)
    assert report.ok, report.problems
    with pytest.raises(CompileError, match="`rowwise` splits a linear layer, but `0` is a `Conv1d`"):
        tpplan.compile_plan(
            nn.Sequential(nn.Conv1d(8, 8, 3, groups=2)), {"version": 1, "modules": {"0": "rowwise"}}, 2, call
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_a_plan_for_it_writes_itself(groups: int) -> None:
    model = Mixer(GatedFirst, groups)
    text = suggest_text(model, 2, False, STREAM)
    program = tpplan.compile_plan(model, load_plan(text), 2, STREAM)
    whole = {p.name for p in program.parameters if not p.layout.is_sharded}
    assert whole == {"norm.weight", "out.bias"}


# -- models of transformers, with what they keep between calls ---------------------------------------------------------
_SMALL = {
    "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 88, "state_size": 6, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"time_step_rank": 4},
    "falcon_mamba": {"time_step_rank": 4, "intermediate_size": 96},
    "mamba2": {"num_heads": 8, "head_dim": 12, "n_groups": 1, "chunk_size": 8},
}


def stock_model(kind: str) -> nn.Module:
    config = CONFIG_MAPPING[kind](**_SMALL, **MODELS[kind])
    return copy_with_numbers(AutoModelForCausalLM.from_config(config), torch.float64, 0)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(4, 80, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def calls_of_many_lengths(model: nn.Module) -> list[Tensor]:
    return [model(input_ids=tokens(b, n), use_cache=False).logits for b, n in ((3, 8), (2, 11), (1, 1), (4, 16))]


def calls_with_a_cache(model: nn.Module) -> list[Tensor]:
    """A prompt, tokens one by one, and several at once."""
    found: list[Tensor] = []
    cache: Any = None
    for length in (7, 1, 1, 1, 5, 1):
        given = {} if cache is None else passing(model, cache)
        result = model(input_ids=tokens(2, length), use_cache=True, **given)
        cache = cache_of(result)
        found.append(result.logits)
    return found


CALLS = (calls_of_many_lengths, calls_with_a_cache)


@pytest.mark.parametrize(
    ("kind", "calls"),
    in_thirds(
        [("mamba", calls_with_a_cache)],
        [],
        [(kind, calls) for kind in MODELS for calls in CALLS],
    ),
)
@pytest.mark.sweep
def test_a_compiled_model_takes_other_lengths_and_a_cache(
    kind: str, calls: Callable[[nn.Module], list[Tensor]]
) -> None:
    model = stock_model(kind)
    inputs = {"input_ids": tokens(3, 8), "use_cache": False}
    plan = load_plan(suggest_text(model, 2, False, inputs))
    proved = compile_call(Request(model, plan, 2, (), inputs))
    program = proved.program
    if version("torch") < "2.13":
        pytest.skip("DTensor of this version lacks rules for the scans, and the mixers stay whole")
    assert sharded_share(program) > 0.98

    def work(axis: ThreadCommunicator) -> list[Tensor]:
        guard = CallGuard(
            make_skeleton(model).model, plan, Compiled(program, {}, (), results=proved.results), (), inputs
        )
        own = lower(copy_structure(model), program, SimulatedDistributor(axis), guard).eval()
        with torch.no_grad():
            return calls(own)

    with torch.no_grad():
        reference = calls(copy.deepcopy(model).eval())
    for found in run_ranks(2, work):
        for ours, theirs in zip(found, reference, strict=True):
            assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-6  # the models compute in float32


def sharded_share(program: Program) -> float:
    sizes = {p.name: torch.Size(p.shape).numel() for p in program.parameters}
    return sum(sizes[p.name] for p in program.parameters if p.layout.is_sharded) / sum(sizes.values())


class TimeMix(nn.Module):
    """RWKV (Peng et al., 2023): the first state is made by the size of the stream, not of what is split."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.gate, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.decay, self.first = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.mix = nn.Parameter(torch.rand(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        shifted = functional.pad(x, (0, 0, 1, -1))
        mixed = x * self.mix + shifted * (1 - self.mix)
        k, v, r = self.key(mixed), self.value(mixed), torch.sigmoid(self.gate(mixed))
        above = torch.zeros(batch, width, dtype=x.dtype, device=x.device)
        below, seen = torch.zeros_like(above), []
        for step in range(length):
            now = torch.exp(self.first + k[:, step])
            seen.append((above + now * v[:, step]) / (below + now))
            kept = torch.exp(-self.decay)
            above, below = kept * above + k[:, step].exp() * v[:, step], kept * below + k[:, step].exp()
        return self.out(r * torch.stack(seen, dim=1))


@pytest.mark.parametrize("size", [2, 4])
def test_a_scan_that_begins_with_zeros_as_wide_as_the_stream(size: int) -> None:
    torch.manual_seed(0)
    rules: dict[str, Any] = {"0.{key,value,gate}": "colwise", "0.{decay,first}": "colwise", "0.out": "rowwise"}
    report = tpplan.verify(nn.Sequential(TimeMix()), {"version": 1, "modules": rules}, size, (torch.randn(2, 5, 16),))
    assert report.ok, report.problems

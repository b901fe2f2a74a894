"""Norms over features that are split: over all heads of a projection, as OLMo-2 has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import tpplan
from tpplan.calls.inference_cost import inference
from tpplan.compat.process_groups import fake_process_group
from tpplan.compiler.ir.layout import Collective
from tpplan.cost.traffic import module_traffic
from tpplan.parity import verify_program
from tpplan.plan import load_plan
from tpplan.runtime.bodies import bodies

WIDTH, HEADS, GROUPS = 32, 4, 2
ACTIVATIONS = (torch.randn(3, 5, WIDTH, requires_grad=True),)
RULES = {"{q,k,v}": "colwise", "o": "rowwise"}
PLAN = {"version": 1, "modules": RULES}


class Root(nn.RMSNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)


class CastAfter(nn.Module):
    """An RMSNorm that is written by hand, with an offset to its weight, as Gemma has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype is torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1 + self.weight)).to(x.dtype)


class Attention(nn.Module):
    """Queries and keys are normalized over all of their heads; keys and values have fewer of these."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.repeats = HEADS // GROUPS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, GROUPS * size), nn.Linear(WIDTH, GROUPS * size)
        self.q_norm, self.k_norm = norm(WIDTH), norm(GROUPS * size)
        for held in (self.q_norm, self.k_norm):
            for parameter in held.parameters():
                nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

        q, k, v = heads(self.q_norm(self.q(x))), heads(self.k_norm(self.k(x))), heads(self.v(x))
        k, v = (y.repeat_interleave(self.repeats, 1) for y in (k, v))
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)])
def test_the_statistic_is_counted_in_the_dtype_that_it_is_summed_in(dtype: torch.dtype, width: int) -> None:
    model = Attention(Root).to(dtype)
    view = inference(model, load_plan(PLAN), 2, (ACTIVATIONS[0].detach().to(dtype),), {})
    assert view.prefill.sent == module_traffic(view.program.modules, 2).forward.sent
    # Two statistics of each of 15 tokens, and the result.
    assert view.prefill.sent == {"all-reduce": 2 * 15 * width + 15 * WIDTH * dtype.itemsize}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("norm", [nn.LayerNorm, Root, CastAfter])
def test_the_statistic_is_summed(norm: type[nn.Module], size: int) -> None:
    model = Attention(norm)
    program = tpplan.compile_plan(model, PLAN, size, ACTIVATIONS)
    split = [m.name for m in program.modules if m.split_norm is not None]
    assert split == ["q_norm", "k_norm"]
    assert not any(way is Collective.ALL_GATHER for _, r in program.reshards() for way in (r.forward, r.backward))
    report = verify_program(model, program, (ACTIVATIONS, {}))
    assert report.ok, report.problems


@pytest.mark.processes
def test_on_processes() -> None:
    report = tpplan.verify(Attention(nn.LayerNorm), PLAN, 2, ACTIVATIONS, processes=True)
    assert report.ok, report.problems


def test_a_statistic_that_is_not_summed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention(Root)
    program = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS)
    true = bodies.make_reshard

    def forward_only(source, target, forward, backward, *rest):
        kept = Collective.NONE if backward is Collective.ALL_REDUCE and source.forward == "P" else backward
        return true(source, target, forward, kept, *rest)

    monkeypatch.setattr(bodies, "make_reshard", forward_only)
    assert not verify_program(model, program, (ACTIVATIONS, {})).ok


def test_a_norm_that_reads_the_first_features_on_every_rank_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention(Root)
    program = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS)
    monkeypatch.setattr(bodies.PartReader, "__call__", lambda self, parameter: self._summed(parameter)[: WIDTH // 4])
    with pytest.raises(tpplan.TpplanError):
        verify_program(model, program, (ACTIVATIONS, {}))


def test_counted_as_predicted() -> None:
    model = Attention(nn.LayerNorm)
    predicted = tpplan.compile_plan(model, PLAN, 2, ACTIVATIONS).count_collectives()
    assert predicted == {"all-reduce": 2 + 8 + 1}  # around the block, mean and variance each way, the norms' gradients
    with fake_process_group(2):
        sharded = tpplan.parallelize(model, PLAN, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), ACTIVATIONS)
        with CommDebugMode() as mode:
            sharded(*ACTIVATIONS).sum().backward()
    assert mode.get_total_counts() == sum(predicted.values())

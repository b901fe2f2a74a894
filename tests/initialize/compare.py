"""A model that is initialised on `meta`, whole or as one rank's parts, against the stock one from the same seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpplan
from tests.runtime.simulated import plan_of
from tpplan.compat.dtensors import local_of
from tpplan.initialize.construction import named_tensors
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import Rendezvous, ThreadCommunicator
from tpplan.plan import Plan
from tpplan.runtime.lower import lower
from tpplan.runtime.parameters.whole_states import part_of

Make = Callable[[], nn.Module]
SEED = 5


def stock_of(make: Make) -> tuple[nn.Module, Tensor]:
    """The stock model, and the state of the generator after it was made."""
    torch.manual_seed(SEED)
    return make(), torch.get_rng_state()


def on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


def without_numbers(stock: nn.Module) -> nn.Module:
    """A copy of a model on `meta`, whose ties are its own."""
    memo: dict[int, Any] = {}
    for _, tensor in named_tensors(stock):
        held = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(held, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else held
    return copy.deepcopy(stock, memo)


def parts(make: Make, plan: Plan | str | dict[str, Any], inputs: Any, rank: int, size: int = 2) -> nn.Module:
    """One rank's model on `meta`, without other ranks."""
    model = on_meta(make)
    held = plan_of(plan) if not isinstance(plan, Plan) else plan
    program = tpplan.compile_plan(model, held, size, inputs)
    return lower(model, program, SimulatedDistributor(ThreadCommunicator(Rendezvous(size), rank)))


def unlike(model: nn.Module, stock: nn.Module) -> list[str]:
    """The names of tensors that aren't the rank's parts of the stock model's, bit by bit; of ties, too."""
    wrong: list[str] = []
    whole, own = dict(named_tensors(stock)), dict(named_tensors(model))
    registered = [*dict(stock.named_parameters(remove_duplicate=False)), *dict(stock.named_buffers())]
    for name in registered:
        held = own[name]
        part = part_of(held).of(whole[name].detach()) if isinstance(held, DTensor) else whole[name].detach()
        local = local_of(held).detach()
        if local.is_meta or local.dtype != part.dtype or not torch.equal(local, part):
            wrong.append(name)
        if held.requires_grad != whole[name].requires_grad or isinstance(held, nn.Parameter) != isinstance(
            whole[name], nn.Parameter
        ):
            wrong.append(f"{name}'s flags")
    for name in registered:
        for other in registered:
            if (whole[name] is whole[other]) != (own[name] is own[other]):
                wrong.append(f"the tie of {name} and {other}")
    return wrong


def differences(make: Make, model: nn.Module, build: Make | None = None) -> list[str]:
    """What differs after `init_weights`, the state of the generator among it."""
    stock, after = stock_of(make)
    torch.manual_seed(SEED)
    assert tpplan.init_weights(model, build=build) is model
    wrong = unlike(model, stock)
    return wrong if torch.equal(torch.get_rng_state(), after) else [*wrong, "the generator's state"]

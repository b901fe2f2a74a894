"""States of optimizers: saved whole, loaded in parts, at any degree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.optimization import Adafactor

from tests.plans.parity import tolerance
from tests.runtime.world import Member, world
from tests.training.runs import made, sharded
from tpplan import TrainingError
from tpplan.training.states import parts_of_state, refuse_plain, whole_state

pytestmark = pytest.mark.processes

IDS = torch.arange(24).view(2, 12)


def _stepped(model: Any, kind: Any, **options: Any) -> Any:
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    return optimizer


KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
)


def _round_trips(member: Member) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    model: Any = None
    for kind, options in KINDS:
        model = sharded(member, "gpt2")
        optimizer = _stepped(model, kind, **options)
        state = whole_state(optimizer.state_dict())
        found.append(copy.deepcopy(state))  # steps are counted in place
        again = kind(model.parameters(), lr=1e-2, **options)
        again.load_state_dict(parts_of_state(again, state))
        for parameter, before in optimizer.state.items():
            for name, held in before.items():
                loaded = again.state[parameter][name]
                assert type(loaded) is type(held) or held.shape != parameter.shape, (name, type(held), type(loaded))
                first, second = (item.full_tensor() if isinstance(item, DTensor) else item for item in (held, loaded))
                assert torch.equal(first, second), name
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        again.step()
    for refused in (torch.optim.Adafactor(model.parameters()), Adafactor(model.parameters())):
        with pytest.raises(TrainingError, match="TP191 loop-option: the optimizer `Adafactor` can't step on"):
            refuse_plain(refused)
    refuse_plain(torch.optim.AdamW(model.parameters(), fused=True))
    of = {name: held[:, :-1] if held.dim() else held for name, held in found[0]["state"][0].items()}
    state = found[0] | {"state": {0: of}}
    with pytest.raises(TrainingError, match=r"TP193 optimizer-state: `exp_avg` of parameter 0 has shape \(64, 31\)"):
        parts_of_state(torch.optim.AdamW(model.parameters()), state)
    return found


@pytest.mark.slow
def test_states_are_the_unsharded_models() -> None:
    for (kind, options), ours in zip(KINDS, world(2).run(_round_trips)[0], strict=True):
        stock = _stepped(made("gpt2"), kind, **options).state_dict()
        assert ours["param_groups"] == stock["param_groups"]
        for number, of in stock["state"].items():
            for name, held in of.items():
                mine = ours["state"][number][name]
                limit = tolerance(torch.float32) * max(float(held.abs().max()), 1e-3)
                assert mine.shape == held.shape and float((mine - held).abs().max()) < limit, (kind, number, name)

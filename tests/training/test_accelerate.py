"""A plain loop with accelerate's Accelerator: batches, accumulation, norms, states, and what it gathers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tpplan
from tests.plans.parity import tolerance
from tests.runtime.world import Member, world
from tests.training.runs import Run, launched, made, padded, samples, sharded, whole

pytestmark = pytest.mark.processes
EXACT = tolerance(torch.float32)


def _loop(member: Member | None, folder: str, replicas: int = 1, linked: bool = True) -> dict[str, Any]:
    """Two epochs and the second once more; `linked`: accelerate steps the schedule, for each replica once."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DataLoaderConfiguration, set_seed

    with nullcontext() if member is None else launched(member):
        set_seed(1)
        size = 1 if member is None else member.size // replicas
        config = None if member is None else ParallelismConfig(tp_size=size, dp_shard_size=replicas)
        tpplan.follow_training_loops()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            step_scheduler_with_optimizer=linked,
            parallelism_config=config,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        stock: Any = made("gpt2") if member is None else sharded(member, "gpt2", replicas=replicas)
        optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6)
        data = DataLoader(samples(Run(), 24), batch_size=8 // replicas, shuffle=True, collate_fn=padded)  # pyright: ignore
        model, optimizer, data, schedule = accelerator.prepare(stock, optimizer, data, schedule)
        losses: list[float] = []
        norms: list[float] = []
        rates: list[float] = []

        def epoch() -> None:
            for batch in data:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))  # pyright: ignore
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))  # pyright: ignore
                rates.append(schedule.get_last_lr()[0])

        epoch()
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        epoch()
        straight = whole(accelerator.unwrap_model(model))
        accelerator.load_state(folder)
        data.set_epoch(1)
        epoch()
        seen = [accelerator.gather_for_metrics(batch["input_ids"]) for batch in data]
        return {
            "losses": losses,
            "norms": norms,
            "rates": rates,
            "straight": straight,
            "resumed": whole(accelerator.unwrap_model(model)),
            "state": accelerator.get_state_dict(model),
            "seen": torch.cat(seen).sort(0).values,  # pyright: ignore
        }


def _assert_alike(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    for name in ("rates", "norms", "losses"):
        assert ours[name] == pytest.approx(stock[name], rel=EXACT, abs=EXACT), name
    for name, held in stock["straight"].items():
        assert torch.equal(ours["resumed"][name], ours["straight"][name]), name
        assert float((ours["straight"][name] - held).abs().max()) < EXACT, name
    assert {*ours["state"]} == {*stock["state"]}
    for name, held in ours["resumed"].items():
        assert torch.equal(ours["state"][name], held), name
    assert torch.equal(ours["seen"], stock["seen"])


@pytest.mark.slow
def test_a_loop_is_that_of_the_unsharded_model_and_goes_on_from_its_state(tmp_path: Path) -> None:
    stock = _loop(None, str(tmp_path / "stock"))
    for ours in world(2).run(_loop, str(tmp_path / "ours")):
        _assert_alike(ours, stock)


@pytest.mark.slow
def test_a_loop_over_replicas(tmp_path: Path) -> None:
    stock = _loop(None, str(tmp_path / "stock"), 1, False)
    for ours in world(4).run(_loop, str(tmp_path / "ours"), 2, False):
        _assert_alike(ours, stock)

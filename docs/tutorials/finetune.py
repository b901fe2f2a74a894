"""Train a small GPT-2 on text with tensor parallelism, and see that it learns as the unsharded model does.

    torchrun --nproc-per-node 2 docs/tutorials/finetune.py

Each process holds half of the model. The script also trains the stock model, prints both losses side by side, and draws
both curves. Leave that out with `--no-compare`, as you would for a model that doesn't fit on one device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from curve import draw, tell
from rich.progress import track
from text import VOCABULARY, batches, corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import tpplan


def build(length: int) -> GPT2LMHeadModel:
    """The stock model. Without dropout, whose masks no two runs share, so that the losses can be compared."""
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=length, n_embd=128, n_layer=3, n_head=4, **off, **ends)
    )


def train(model: nn.Module, data: Iterator[Tensor], steps: int, name: str) -> list[float]:
    """The usual loop: nothing in it knows that the model is sharded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    losses: list[float] = []
    model.train()
    for _ in track(range(steps), name, disable=dist.get_rank() != 0):
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, compare, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--plan", default="gpt2", help="a plan file, or a shipped plan's name")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("out/finetune"), help="where the model and the picture go")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    size, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("tp",))
    text = corpus().to(device)
    curves: dict[str, list[float]] = {}

    if options.compare:
        stock = build(options.length).to(device)
        curves["unsharded"] = train(stock, batches(text, options.batch, options.length, 1), options.steps, "unsharded")

    model = tpplan.parallelize(build(options.length).to(device), options.plan, mesh)
    name = f"tpplan on {size}"
    curves[name] = train(model, batches(text, options.batch, options.length, 1), options.steps, name)

    tpplan.save_weights(model, options.out)  # a folder that transformers and tpplan.from_pretrained read
    draw(curves, options.out.with_suffix(".svg"), "GPT-2 of three layers, 512 bytes a step")
    tell(curves)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

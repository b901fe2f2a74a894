"""Tensor parallelism inside, FSDP2 around it: four processes as a mesh of 2 × 2.

    torchrun --nproc-per-node 4 docs/tutorials/fsdp.py

First `tpplan.parallelize` on the axis `tp`, then torch's `fully_shard` on the axis `dp`. Ranks of one row of `tp` see
the same batch, the rows of `dp` different ones. FSDP averages the gradients over them, so that the losses are those of
the stock model on both batches together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from curve import draw, tell
from finetune import build
from rich.progress import track
from text import batches, corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tpplan


def train(model: nn.Module, data: Iterator[Tensor], steps: int, name: str) -> list[Tensor]:
    """The loop of `finetune.py`, with the losses of this rank's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses: list[Tensor] = []
    for _ in track(range(steps), name, disable=dist.get_rank() != 0):
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main() -> None:
    """Train, compare, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank of dp")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--plan", default="gpt2", help="a plan file, or a shipped plan's name")
    parser.add_argument("--out", type=Path, default=Path("out/fsdp"), help="where the model and the picture go")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    text = corpus().to(device)
    row = mesh["dp"].get_local_rank()

    stock = build(options.length).to(device)
    both = zip(*(batches(text, options.batch, options.length, seed) for seed in range(2)), strict=True)
    expected = train(stock, (torch.cat(two) for two in both), options.steps, "unsharded")

    model = tpplan.parallelize(build(options.length).to(device), options.plan, mesh["tp"])
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    losses = torch.stack(train(model, batches(text, options.batch, options.length, row), options.steps, "2 × tpplan"))
    dist.all_reduce(losses, op=dist.ReduceOp.SUM, group=mesh["dp"].get_group())
    losses /= 2

    tpplan.save_weights(model, options.out)
    curves = {"unsharded": torch.stack(expected).tolist(), "FSDP2 on 2 × tpplan on 2": losses.tolist()}
    draw(curves, options.out.with_suffix(".svg"), "GPT-2 of three layers, 512 bytes a step")
    tell(curves)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

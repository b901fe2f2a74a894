"""Mixed precision: what autocast and bfloat16 parameters do to the loss, and to a rank's memory at its peak.

    torchrun --nproc-per-node 2 docs/tutorials/precision.py --precision autocast

`float32` has parameters, gradients and optimizer state of 4 bytes each. `autocast` keeps these, and computes linear
layers and attention in bfloat16. `bfloat16` has all of them in 2 bytes, as `model.bfloat16()` before `parallelize` has
it. On GPUs take the sizes of your model; the peak is then that of torch's allocator, on a CPU that of the process.
`--ranks 1` trains the stock model, to compare with.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from own import PLAN, Model, train
from text import batches, corpus
from torch.distributed.device_mesh import init_device_mesh

import tpplan


def resident(line: str) -> int:
    """Bytes of the process's memory: `VmRSS` now, `VmHWM` at the peak."""
    (found,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(line))
    return int(found.split()[1]) * 1024


def begin() -> int:
    """Begin to watch for the peak; the bytes that are held already."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak() -> int:
    """The most bytes that were held since."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident("VmHWM")


def main() -> None:
    """Train in one precision, and print the losses and the peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["float32", "autocast", "bfloat16"], default="autocast")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=2, help="1: the stock model, on each rank")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    text = corpus().to(device)
    call = (torch.zeros(options.batch, options.length, dtype=torch.long, device=device),)
    dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32

    with torch.device("meta"):
        model: torch.nn.Module = Model(options.width, layers=options.layers, length=options.length).to(dtype)
    if options.ranks > 1:
        model = tpplan.parallelize(model, PLAN, mesh, inputs=call)
    before = begin()
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)

    data = batches(text, options.batch, options.length, 1)
    around = partial(torch.autocast, device, torch.bfloat16, enabled=options.precision == "autocast")
    losses = train(model, data, options.steps, around)
    held = (peak() - before) / 2**20
    if dist.get_rank() == 0:
        print(f"{options.precision}, {options.ranks} ranks: loss {losses[-1]:.4f}, {held:.0f} MiB a rank at the peak")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

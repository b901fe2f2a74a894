"""Train LoRA adapters on a sharded model, from the checkpoint that `finetune.py` has written.

    torchrun --nproc-per-node 2 docs/tutorials/finetune.py --no-compare
    torchrun --nproc-per-node 2 docs/tutorials/lora.py

The adapters are added first, then the model is parallelized, with the plan of the stock model: a rule for `c_attn`
holds for its base and its adapters. Only the adapters are trained, and saved.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from curve import draw, tell
from finetune import train
from peft import LoraConfig, get_peft_model
from text import batches, corpus
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2LMHeadModel

import tpplan


def build(base: Path) -> Any:
    """The stock model with adapters; the same on every rank."""
    model = GPT2LMHeadModel.from_pretrained(base)
    model.config.resid_pdrop = model.config.embd_pdrop = model.config.attn_pdrop = 0.0
    torch.manual_seed(1)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    return get_peft_model(model, adapters)


def main() -> None:
    """Train, compare, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("out/finetune"), help="a folder with the base model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--plan", default="gpt2", help="a plan file, or a shipped plan's name")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="where the adapters and the picture go")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    size, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("tp",))
    text = corpus().to(device)
    text = text[: len(text) // 4]  # what the adapters are to learn
    curves: dict[str, list[float]] = {}

    if options.compare:
        stock = build(options.base).to(device)
        curves["unsharded"] = train(stock, batches(text, options.batch, options.length, 1), options.steps, "unsharded")

    model = tpplan.parallelize(build(options.base).to(device), options.plan, mesh)
    name = f"tpplan on {size}"
    curves[name] = train(model, batches(text, options.batch, options.length, 1), options.steps, name)

    model.save_pretrained(options.out)  # the adapters alone, whole, as peft writes those of the stock model
    draw(curves, options.out.with_suffix(".svg"), "LoRA of rank 8 on GPT-2 of three layers")
    tell(curves)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What of a block's collectives runs beside products, by the cost model: `python -m tests.cost.overlap_table`."""

from __future__ import annotations

from collections import defaultdict

import torch

import tpplan
from tpplan.cost.cluster import cluster_of
from tpplan.cost.hiding import Hiding, Rates
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.cost.work import COLLECTIVE

MODELS = {"8B": (4096, 14336, 32, 8), "70B": (8192, 28672, 64, 8), "405B": (16384, 53248, 128, 8)}
SIZE, ROWS = 8, 8192
PLANS = ("llama-sequence", "llama")


def stock(name: str) -> torch.nn.Module:
    """A model of two blocks, without numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, heads, groups = MODELS[name]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=groups,
        num_hidden_layers=2, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def rows() -> list[tuple[str, ...]]:
    """By model and plan: milliseconds of a block's collectives, the share that is hidden, and that of each unit."""
    cluster, found = cluster_of("h100"), list[tuple[str, ...]]()
    group = Group.of(cluster, SIZE)
    for name in MODELS:
        model = stock(name)
        ids = torch.zeros(1, ROWS, dtype=torch.long, device="meta")
        for plan in PLANS:
            asked = {**tpplan.load_plan(plan).to_dict(), "overlap": "auto"}
            program = tpplan.compile_plan(model, asked, SIZE, {"input_ids": ids, "labels": ids})
            hiding = Hiding.of(program, Rates(cluster, kept=cluster.sustained))
            assert program.measure is not None
            parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for task in program.measure.at(None, None).tasks:
                if task.kind != COLLECTIVE or not task.module.startswith("model.layers.0."):
                    continue
                alone = collective_seconds(cluster, task.name, task.made[0], group)
                for key in ("all", f"{task.name}{', backward' if task.backward else ''}"):
                    parts[key][0] += alone * task.times / 2
                    parts[key][1] += hiding.seconds(task, alone) * task.times / 2
            shares = [f"{key} {100 * hid / whole:.0f}%" for key, (whole, hid) in parts.items()]
            found.append((name, plan, f"{parts['all'][0] * 1e3:.2f} ms", *shares))
    return found


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))

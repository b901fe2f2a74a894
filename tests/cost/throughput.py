"""Published throughputs of training, and what is estimated for the same models, degrees and GPUs.

`python -m tests.cost.throughput` prints the table of docs/costs.md. The sources are torchtitan's, and Megatron-LM's:

    [1] pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (December 2024)
    [2] pytorch/torchtitan, docs/performance.md (Llama 3 and 2 on A100)
    [3] the same page a year later (Llama 3.1 405B on H100 of 94 GB, without float8)
    [4] Megatron-LM: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, tables 3
        and 5: iterations of 4 × 2048 tokens take 1.10 and 1.42 s; its kernels fuse what a compiler fuses
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

import tpplan
from tpplan.cost.cluster import Cluster, cluster_of
from tpplan.cost.estimates import Estimate

# Layers, hidden size, heads, key heads, inner size, vocabulary.
SIZES = {
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 128256),
    "Llama 3 70B": (80, 8192, 64, 8, 28672, 128256),
    "Llama 3 405B": (126, 16384, 128, 8, 53248, 128256),
    "Llama 2 13B": (40, 5120, 40, 40, 13824, 32000),
    "Llama 2 70B": (80, 8192, 64, 8, 28672, 32000),
    "GPT 22B": (48, 6144, 64, 64, 24576, 51200),
}


@dataclass(frozen=True)
class Published:
    """A throughput that was published.

    Attributes:
        sequence: whether the sequence is split beside tensors.
        fitted: whether `Cluster.sustained`, or the share of the peak under the power limit of [1], was chosen by it;
            the others are held out.
    """

    source: int
    model: str
    gpu: str
    tp: int
    dp: int
    batch: int
    length: int
    checkpointing: str
    compiled: bool
    tokens: float
    fitted: bool = False
    precision: str | None = None
    sequence: bool = True

    def cluster(self) -> Cluster:
        """[1] tells HBM2e of 2.4 TB/s, and 500 W of 700 W; how fast products are then was chosen by its first row."""
        found = cluster_of(self.gpu)
        if self.source == 1:
            found = replace(found, memory_bandwidth=2.4e12, memory=96 * 2**30, product_efficiency=POWER_LIMITED)
        return found


POWER_LIMITED = 0.7
PUBLISHED = (
    Published(1, "Llama 3 8B", "h100", 1, 8, 2, 8192, "selective", False, 5762, fitted=True),
    Published(1, "Llama 3 8B", "h100", 1, 8, 2, 8192, "selective", True, 6667),
    Published(1, "Llama 3 8B", "h100", 1, 128, 2, 8192, "selective", False, 5605, fitted=True),
    Published(1, "Llama 3 8B", "h100", 1, 128, 2, 8192, "selective", True, 6514),
    Published(1, "Llama 3 70B", "h100", 8, 32, 16, 8192, "full", True, 829, precision="fp8"),
    Published(2, "Llama 3 8B", "a100", 1, 64, 1, 8192, "selective", True, 2973, fitted=True),
    Published(2, "Llama 3 70B", "a100", 1, 64, 1, 8192, "full", True, 331),
    Published(2, "Llama 2 13B", "a100", 1, 64, 2, 4096, "none", True, 2162, fitted=True),
    Published(2, "Llama 2 13B", "a100", 1, 64, 2, 4096, "selective", True, 1904),
    Published(2, "Llama 2 70B", "a100", 1, 64, 2, 4096, "full", True, 353),
    Published(3, "Llama 3 405B", "h100", 8, 16, 2, 8192, "full", False, 109),
    Published(4, "GPT 22B", "a100", 8, 1, 4, 2048, "selective", True, 8192 / 8 / 1.10),
    Published(4, "GPT 22B", "a100", 8, 1, 4, 2048, "full", True, 8192 / 8 / 1.42, sequence=False),
)  # fmt: skip


def model_of(name: str) -> nn.Module:
    import transformers

    layers, hidden, heads, groups, inner, vocabulary = SIZES[name]
    config: Any = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner, vocab_size=vocabulary, max_position_embeddings=131072,
    )  # fmt: skip
    if name.startswith("GPT"):  # of before there was flash attention
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary, n_positions=2048,
        )  # fmt: skip
        config._attn_implementation = "eager"
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@cache
def program_of(name: str, tp: int, batch: int, length: int, sequence: bool) -> tpplan.Program:
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = ("gpt2" if name.startswith("GPT") else "llama") + ("-sequence" if sequence and tp > 1 else "")
    return tpplan.compile_plan(model_of(name), plan, tp, inputs)


def estimated(row: Published) -> Estimate:
    program = program_of(row.model, row.tp, row.batch, row.length, row.sequence)
    return tpplan.estimate(
        program, topology=row.cluster(), dp=row.dp, fsdp=row.dp > 1, checkpointing=row.checkpointing,
        compiled=row.compiled, precision=row.precision,
    )  # fmt: skip


def errors() -> Iterator[tuple[Published, float, float]]:
    """Each with the tokens a second of a GPU, and by how much these are off."""
    for row in PUBLISHED:
        found = estimated(row).tokens_per_second / (row.tp * row.dp)
        yield row, found, found / row.tokens - 1


def table() -> str:
    lines = [
        "| model | GPUs | tp × fsdp | batch | checkpoints | compiled | published | estimated | off | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, found, error in errors():
        kind = "fitted" if row.fitted else "held out"
        degrees = f"{row.tp} × {row.dp}" + (" (sequence whole)" if not row.sequence else "")
        compiled = ("yes" if row.compiled else "no") + (f", {row.precision}" if row.precision else "")
        lines.append(
            f"| {row.model} | {row.tp * row.dp} × {row.gpu} [{row.source}] | {degrees} "
            f"| {row.batch} × {row.length} | {row.checkpointing} | {compiled} | {row.tokens:,.0f} | {found:,.0f} "
            f"| {error:+.0%} | {kind} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

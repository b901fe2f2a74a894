"""What a rank really holds: a sharded model that runs on a CPU, whose storages are counted.

`python -m tests.cost.truth` prints the table of docs/costs.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tpplan
from tpplan.calls.storage import StorageMeter
from tpplan.parity.materialise import copy_structure
from tpplan.parity.rank import SimulatedDistributor
from tpplan.parity.threads import ThreadCommunicator, run_ranks
from tpplan.runtime.lower import lower

BATCH, LENGTH, LAYERS = 2, 32, 3
_DECODER: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "vocab_size": 96, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", _DECODER | {"num_key_value_heads": 4}),
    "mixtral": ("AutoModelForCausalLM", _DECODER | {"num_key_value_heads": 4, "num_local_experts": 4}),
    "gpt2": (
        "AutoModelForCausalLM",
        {"n_embd": 64, "n_layer": LAYERS, "n_head": 8, "vocab_size": 96, "n_positions": 64, "use_cache": False,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"d_model": 64, "d_kv": 8, "d_ff": 160, "num_layers": LAYERS, "num_heads": 8, "vocab_size": 96,
         "use_cache": False, "dropout_rate": 0.0},
    ),
    "vit": (
        "AutoModel",
        {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
         "image_size": 48, "patch_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """Bytes that a rank really holds, beside those that are estimated."""

    parameters: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]
    activations: tuple[int, int]

    def error(self, name: str) -> float:
        real, estimated = getattr(self, name)
        return estimated / real - 1


def model_and_call(kind: str, labels: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    maker, fields = CONFIGS[kind]
    config = transformers.AutoConfig.for_model(kind, **fields)
    model: nn.Module = getattr(transformers, maker).from_config(config).train()
    if kind == "vit":
        return model, {"pixel_values": torch.rand(BATCH, 3, 48, 48)}
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 90 + 1
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model, call | ({"decoder_input_ids": ids} if kind == "t5" else {}) | ({"labels": ids} if labels else {})


def compare(kind: str, plan: str, tp: int, labels: bool = False) -> Truth:
    """Run a plan's ranks in threads, and count what the first holds."""
    model, call = model_and_call(kind, labels)
    program = tpplan.compile_plan(model, plan, tp, call)
    cost = tpplan.estimate(program, optimizer="adamw").memory

    def rank(axis: ThreadCommunicator) -> tuple[int, int, int, int]:
        own = lower(copy_structure(model), program, SimulatedDistributor(axis), None)
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.normal_(0, 0.02)
        with StorageMeter() as meter:
            result = own(**call)
            live = meter.live
            made = [held for held in result.values() if isinstance(held, Tensor) and held.requires_grad]
            torch.autograd.backward(made, [torch.ones_like(held) for held in made])
        optimizer = torch.optim.AdamW(own.parameters())
        optimizer.step()
        parameters = [_local(held) for held in own.parameters()]
        state = [_local(held) for entry in optimizer.state.values() for held in entry.values() if held.dim()]
        gradients = [_local(held.grad) for held in own.parameters() if held.grad is not None]
        return _bytes(parameters), _bytes(gradients), _bytes(state), live

    real = run_ranks(tp, rank)[0]
    estimated = (cost.parameters, cost.gradients, cost.optimizer, cost.activations)
    return Truth(*zip(real, estimated, strict=True))


def _local(held: Any) -> Tensor:
    return held.to_local() if hasattr(held, "to_local") else held


def _bytes(tensors: list[Tensor]) -> int:
    return sum({held.untyped_storage().data_ptr(): held.untyped_storage().nbytes() for held in tensors}.values())


def cases() -> list[tuple[str, str, int]]:
    plans = [(kind, plan) for kind in CONFIGS for plan in (kind, f"{kind}-sequence") if plan != "vit-sequence"]
    return [(kind, plan, tp) for kind, plan in plans for tp in (2, 4)]


def table() -> str:
    lines = ["| plan | tp | state, KiB | off | activations, KiB | off |", "|---|---|---|---|---|---|"]
    for kind, plan, tp in cases():
        truth = compare(kind, plan, tp)
        state = [sum(held) for held in zip(truth.parameters, truth.gradients, truth.optimizer, strict=True)]
        lines.append(
            f"| {plan} | {tp} | {state[0] / 1024:,.0f} | {state[1] / state[0] - 1:+.1%} "
            f"| {truth.activations[0] / 1024:,.0f} | {truth.error('activations'):+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

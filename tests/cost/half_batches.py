"""What halves of a batch in turns would hide of a block's all-reduces, by the cost model.

`python -m tests.cost.half_batches` prints the table of docs/decisions/059-what-overlap-leaves.md.

Two streams and a link. A half runs up to the sum that it begins, then the other; a sum is waited for when the half that
reads it has its turn. What smaller kernels take longer, and what is written more, counts against what is hidden:

    modules   the halves take turns inside of each attention and each MLP; the last sum of each forward in parts
    blocks    inside of each block, whose attention and MLP are two turns; likewise
    model     from the first block to the last: more than that can't be hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

import tpplan
from tests.cost.overlap_table import MODELS, SIZE, stock
from tpplan.cost.cluster import cluster_of
from tpplan.cost.hiding import Hiding, Rates, sums_in_parts
from tpplan.cost.kernel_times import task_seconds
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.cost.work import COLLECTIVE, Task

CALLS = ((2, 4096), (2, 8192), (4, 8192))
CLUSTER = cluster_of("h100")
GROUP = Group.of(CLUSTER, SIZE)
DEPTH = 32
_WRITTEN = CLUSTER.memory_bandwidth * CLUSTER.memory_efficiency


@cache
def _tasks(name: str, batch: int, sequence: int, overlap: str) -> tuple[tuple[Task, float], ...]:
    """A block's tasks, and what of each is hidden by `overlap`."""
    model = stock(name)
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    asked = {**tpplan.load_plan("llama").to_dict(), "overlap": overlap}
    program = tpplan.compile_plan(model, asked, SIZE, {"input_ids": ids, "labels": ids})
    assert program.measure is not None
    hiding = Hiding.of(program, Rates(CLUSTER, kept=CLUSTER.sustained))
    tasks = (t for t in program.measure.at(None, None).tasks if t.module.startswith("model.layers.0"))
    return tuple((task, hiding.seconds(task, _seconds(task)) if task.kind == COLLECTIVE else 0.0) for task in tasks)


def _seconds(task: Task) -> float:
    if task.kind == COLLECTIVE:
        return collective_seconds(CLUSTER, task.name, task.made[0], GROUP)
    return task_seconds(CLUSTER, task) / CLUSTER.sustained


@dataclass(frozen=True)
class Turn:
    """What a half does before it begins a sum, and after it."""

    before: float
    after: float = 0.0


@dataclass(frozen=True)
class Block:
    """A block's turns: attention, MLP; what is left after the second sum of the forward; seconds of one sum."""

    forward: tuple[Turn, Turn]
    rest: float
    backward: tuple[Turn, Turn]
    sum: float


def block(name: str, batch: int, sequence: int) -> Block:
    """The turns of a call's block, without the copies before sums, of which there are as many either way."""
    forward, backward, weights, rest, adds = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0, 0
    entered: set[str] = set()
    total = 0.0
    for task, _ in _tasks(name, batch, sequence, "none"):
        module = task.module.removeprefix("model.layers.0").lstrip(".")
        seconds, part = _seconds(task), int(not module.startswith("self_attn"))
        if task.kind == COLLECTIVE:
            total = seconds
        elif module == "input_layernorm":  # which stands for both norms
            for each in (0, 1):
                (backward if task.backward else forward)[each] += seconds
        elif not module:  # the additions to the residual stream
            forward[1] += seconds if not adds else 0.0
            rest, adds = seconds, adds + 1
        elif task.name != "aten.clone.default":
            seconds *= 2 if module == "mlp.gate_proj" else 1  # which stands for `up_proj`, too
            enters = task.kind == "product" and module.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "gate_proj")
            late = task.backward and enters and module not in entered
            if late:
                entered.add(module)
            (weights if late else backward if task.backward else forward)[part] += seconds
    made = [Turn(b, w) for b, w in zip(backward, weights, strict=True)]
    return Block((Turn(forward[0]), Turn(forward[1])), rest, (made[1], made[0]), total)


def elapsed(turns: Sequence[Turn], one: float, halves: int) -> float:
    """Seconds until all sums of turns have arrived, of which each half waits for its own before it goes on."""
    computed = sent = 0.0
    arrived = [0.0] * halves
    for turn in turns:
        for half in range(halves):
            computed = max(computed, arrived[half]) + turn.before
            sent = arrived[half] = max(sent, computed) + one
            computed += turn.after
    return max(computed, *arrived)


def shares(name: str, batch: int, sequence: int) -> list[float]:
    """The shares of all-reduces that are hidden: by `overlap: auto`, and by halves of modules, blocks and the model."""
    whole, half = block(name, batch, sequence), block(name, batch // 2, sequence)
    hidden, inner, heads, groups = MODELS[name]
    weights = (2 * hidden * hidden * (1 + groups / heads) + 3 * hidden * inner) / SIZE * 2
    summed = 1.5 * weights / _WRITTEN  # the second half's gradients of weights are added to the first's
    joined = 2 * 2 * batch * sequence * hidden / _WRITTEN  # the halves of a result, and of a gradient, are one again
    plain = [sum(turn.before + turn.after + whole.sum for turn in turns) for turns in (whole.forward, whole.backward)]
    plain[0] += whole.rest
    rates, rows = Rates(CLUSTER, kept=CLUSTER.sustained), batch // 2 * sequence
    last = [
        max(
            0.0,
            *(rates.summed([(hidden, wide // SIZE, "bfloat16", 2)], rows, way, GROUP) for way, _ in sums_in_parts()),
        )
        for wide in (hidden, inner)
    ]
    halved = [
        sum(elapsed([turn], half.sum, 2) + joined for turn in (*half.forward, *half.backward))
        + whole.rest + summed - sum(last),
        elapsed(half.forward, half.sum, 2) + elapsed(half.backward, half.sum, 2)
        + 2 * half.rest + 2 * joined + summed - last[1],
    ]  # fmt: skip
    first, second = half.forward
    later = [second, Turn(half.rest + first.before)] * (DEPTH - 1)
    everything = elapsed([first, *later, second], half.sum, 2) + elapsed(half.backward * DEPTH, half.sum, 2)
    halved.append((everything + 2 * half.rest) / DEPTH + summed)
    sums = [(_seconds(t), hid) for t, hid in _tasks(name, batch, sequence, "auto") if t.kind == COLLECTIVE]
    now = sum(hid for _, hid in sums) / sum(alone for alone, _ in sums)
    return [now, *((sum(plain) - one) / (4 * whole.sum) for one in halved)]


def main() -> None:
    """Print the table."""
    for name in MODELS:
        for call in CALLS:
            print(name, "{} x {:,}".format(*call), *(f"{100 * share:.0f}%" for share in shares(name, *call)), sep=" | ")


if __name__ == "__main__":
    main()

"""docs/scaling.json, what programs of large models say of each degree; docs/scaling.md and .svg, tables and a plot.

python -m tests.cost.scaling                  compile all, estimate, and write them
python -m tests.cost.scaling "Llama 3.1 8B"   this model alone; the other rows stay
python -m tests.cost.scaling --page           page and plot from the rows that there are

Models are transformers' own on `meta`, whole, with the published values of their configs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpplan
from tests.cost import mlp_table
from tpplan.bench.environment import describe_environment
from tpplan.cost.asked_costs import CHECKPOINTING
from tpplan.cost.cluster import cluster_of
from tpplan.cost.link_times import Group
from tpplan.cost.traffic import module_traffic
from tpplan.report.shares_plot import shares_svg

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PLOT, ROWS = DOCS / "scaling.md", DOCS / "scaling.svg", DOCS / "scaling.json"
LENGTH, MOST_SEQUENCES = 8192, 2048
MICRO = (1, 2, 4)
GPU, DEGREES, GPUS = "h100", (1, 2, 4, 8, 16, 32, 64), (8, 64, 512, 4096, 16384)
_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
_QWEN = {
    "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, inner: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return _LLAMA | sizes | {"intermediate_size": inner}


MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Llama 3.1 8B": ("llama", _llama(32, 4096, 32, 14336)),
    "Llama 3.1 70B": ("llama", _llama(80, 8192, 64, 28672)),
    "Llama 3.1 405B": ("llama", _llama(126, 16384, 128, 53248)),
    "Qwen3 235B-A22B": ("qwen3_moe", _QWEN),
    "DeepSeek-V3 671B": ("deepseek_v3", {}),  # the defaults of its config are the published values
}
"""By name the model type and the config."""
HIDDEN = {"Qwen3 235B-A22B": 4096, "DeepSeek-V3 671B": 7168} | {
    name: values["hidden_size"] for name, (kind, values) in MODELS.items() if kind == "llama"
}


@dataclass(frozen=True)
class ScaledStep:
    """A step on some GPUs.

    Attributes:
        gpus: how many; each replica of tp of them has `batch` sequences, `micro` of them at once.
        checkpointing: of activations; what is fastest of all that fit, or needs the least memory if none does.
        fits: whether a rank's memory is enough.
        memory: bytes of a rank.
        compute, exposed, seconds: of the step.
        tokens: a second of a GPU.
        mfu: model FLOPs utilisation.
    """

    gpus: int
    batch: int
    micro: int
    checkpointing: str
    fits: bool
    memory: int
    compute: float
    exposed: float
    seconds: float
    tokens: float
    mfu: float


@dataclass(frozen=True)
class ScaledRow:
    """A model at a degree of tensor parallelism.

    Attributes:
        billions: parameters of the model.
        refused: why there is no program; the rest is then empty.
        compiling: processor seconds of `compile_plan`.
        program: bytes of its JSON.
        parameters: bytes of a rank.
        collectives: of a forward and its backward.
        sent: bytes that each rank sends in them for one sequence; without the sums of parameters' gradients.
        compute, exposed: seconds of one sequence on tp GPUs, no replicas and no checkpoints, memory not asked.
        steps: by the number of GPUs.
    """

    model: str
    tp: int
    billions: float
    refused: str = ""
    compiling: float = 0.0
    program: int = 0
    parameters: int = 0
    collectives: int = 0
    sent: int = 0
    compute: float = 0.0
    exposed: float = 0.0
    steps: tuple[ScaledStep, ...] = field(default=())


def model_of(name: str, **changes: Any) -> nn.Module:
    import transformers

    kind, values = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**values, **changes})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def row_of(name: str, tp: int, model: nn.Module) -> ScaledRow:
    """What is compiled and estimated."""
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    kind = MODELS[name][0]
    split = {
        "version": 1,
        "extends": f"{kind}-sequence",
        "modules": {"lm_head": {"style": "colwise", "output": "shard"}},
    }
    plan: Any = split if tp > 1 else {"version": 1, "modules": {}}
    row = ScaledRow(name, tp, sum(p.numel() for p in model.parameters()) / 1e9)
    began = time.process_time()
    try:
        program = tpplan.compile_plan(model, plan, tp, {"input_ids": ids, "labels": ids, "use_cache": False})
    except tpplan.CompileError as error:
        return replace(row, refused=f"{error.code}: {error.diagnostics[0].message}")
    compiling = time.process_time() - began
    one = tpplan.estimate(program, GPU, batch=1, compiled=True)
    traffic = module_traffic(program.modules, tp)
    return replace(
        row, compiling=compiling, program=len(json.dumps(program.to_dict())),
        parameters=sum(p.local_bytes for p in program.parameters),
        collectives=program.count_collectives().total(), sent=(traffic.forward + traffic.backward).total,
        compute=one.step.compute_seconds, exposed=one.step.exposed_seconds,
        steps=tuple(_step(program, gpus) for gpus in GPUS if _sequences(gpus, tp)),
    )  # fmt: skip


def _sequences(gpus: int, tp: int) -> int:
    """Of a replica: one for each GPU, of a batch that ends at `MOST_SEQUENCES`; 0 where replicas are more than that."""
    return tp * min(gpus, MOST_SEQUENCES) // gpus if tp <= gpus else 0


def _step(program: tpplan.Program, gpus: int) -> ScaledStep:
    """The fastest that fits, of all micro-batches and kinds of checkpoints; a micro-batch counts as a step."""
    batch, found = _sequences(gpus, program.size), list[ScaledStep]()
    for micro in [n for n in MICRO if n <= batch]:
        for kind in CHECKPOINTING:
            cost = tpplan.estimate(
                program, GPU, dp=gpus // program.size, fsdp=True, batch=micro, checkpointing=kind, compiled=True
            )
            times = batch // micro
            found.append(ScaledStep(
                gpus, batch, micro, kind, cost.fits, cost.memory.total, cost.step.compute_seconds * times,
                cost.step.exposed_seconds * times, cost.step.total_seconds * times, cost.tokens_per_second / gpus,
                cost.mfu or 0.0,
            ))  # fmt: skip
            if cost.fits:
                break
        if not found[-1].fits:
            break
    fitting = [step for step in found if step.fits]
    return max(fitting, key=lambda step: step.tokens) if fitting else min(found, key=lambda step: step.memory)


# -- the page -----------------------------------------------------------------------------------------------------
_INTRODUCTION = f"""\
# Scale on paper

What programs say of large models, by the cost model of [costs.md](costs.md): no GPU was used, and nothing here is
measured but the compile time. The models are transformers' own on `meta`, whole, in bfloat16, with the published values
of their configs, under the plans that ship for them with sequence parallelism, with `output: shard` for the head, so
that the loss is one over a split vocabulary. H100s, eight in a node, 400 Gb/s a GPU between nodes; sequences of
{LENGTH:,} tokens; AdamW with a float32 master; between products one kernel each, as torch.compile makes them. Replicas
share parameters, gradients and state (FSDP). Pipeline, context and expert parallelism aren't there: for the largest of
these models they are what one would add.

`make scaling` writes this page and [scaling.json](scaling.json); nothing in them is written by hand.

- *compile*: processor seconds of `compile_plan` for the whole model, equal layers solved once, on one core
- *weights*: of a rank; *program*: its JSON; *collectives* and *sends*: of a forward and its backward, and what each
  rank sends in them for one sequence
- *one sequence*: forward, backward and optimizer on tp GPUs alone, whether or not it fits: kernels, exposed
  collectives, and how much faster than at half the degree

Then steps on {GPUS[0]} to {GPUS[-1]:,} GPUs, tokens a second of a GPU. The batch is one sequence a GPU, but
{MOST_SEQUENCES:,} at the most (16.8 million tokens, as Llama 3.1 405B was trained with; Dubey et al., 2024), so many
GPUs must share sequences. A replica takes its sequences in micro-batches of 1, 2 or 4, whichever is fastest and fits,
each counted as a step. *s* and *f*: with selective or full checkpoints. In place of a figure: *memory*, a rank lacks
it; *batch*, there are more replicas than sequences; *refused*, no plan compiles. The fastest is bold; the last column
says what the next degree would change.
"""


def page(rows: list[ScaledRow], told: Mapping[str, str]) -> str:
    parts = [_INTRODUCTION]
    for name in MODELS:
        own = [row for row in rows if row.model == name]
        if own:
            parts += [
                f"## {name}",
                f"{own[0].billions:.1f} billion parameters.",
                _degrees(own),
                _steps(own),
            ]
            parts += [f"tp {row.tp} is refused: {row.refused}." for row in own if row.refused]
    parts += [_WHERE, "\n".join(_stops(rows)), _PLOT, _MLP, mlp_table.performance(), _measured(told)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def plot(rows: list[ScaledRow]) -> str:
    """Communication against kernels of one sequence, a line of each model."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in [row for row in rows if not row.refused]:
        lines.setdefault(f"{row.model}, hidden {HIDDEN[row.model]}", []).append((row.tp, row.exposed / row.compute))
    return shares_svg(lines)


def _degrees(rows: list[ScaledRow]) -> str:
    lines = [
        "| tp | compile, s | program, KB | weights, GB | collectives | sends, GB | kernels, s | exposed, s | faster |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    before: ScaledRow | None = None
    for row in [row for row in rows if not row.refused]:
        whole = row.compute + row.exposed
        faster = f"{(before.compute + before.exposed) / whole:.2f} ×" if before else ""
        lines.append(
            f"| {row.tp} | {row.compiling:.1f} | {row.program / 1e3:,.0f} | {row.parameters / 1e9:,.1f} "
            f"| {row.collectives:,} | {row.sent / 1e9:.2f} | {row.compute:.3f} | {row.exposed:.3f} | {faster} |"
        )
        before = row
    return "\n".join(lines)


def _steps(rows: list[ScaledRow]) -> str:
    head = ["GPUs", *(f"tp {row.tp}" for row in rows), "at once", "step, s", "MFU", "memory, GB", "the next degree"]
    lines = [f"| {' | '.join(head)} |", f"|{'--:|' * (len(head) - 1)}---|"]
    for gpus in GPUS:
        best = _best(rows, gpus)
        cells = [f"{gpus:,}"]
        for row in rows:
            cell = _cell(row, gpus)
            cells.append(f"**{cell}**" if best and row.tp == best[0].tp else cell)
        if best is None:
            cells += [""] * 5
        else:
            row, step = best
            cells += [
                str(step.micro),
                f"{step.seconds:.1f}",
                f"{step.mfu:.0%}",
                f"{step.memory / 1e9:.0f}",
                _next(rows, row, step),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _at(row: ScaledRow, gpus: int) -> ScaledStep | None:
    return next((step for step in row.steps if step.gpus == gpus), None)


def _best(rows: list[ScaledRow], gpus: int) -> tuple[ScaledRow, ScaledStep] | None:
    found = [(row, step) for row in rows if (step := _at(row, gpus)) is not None and step.fits]
    return max(found, key=lambda held: held[1].tokens, default=None)


def _cell(row: ScaledRow, gpus: int) -> str:
    step = _at(row, gpus)
    if row.refused:
        return "refused"
    if step is None:
        return "" if row.tp > gpus else "batch"
    kind = {"selective": " s", "full": " f"}.get(step.checkpointing, "")
    return f"{step.tokens:,.0f}{kind}" if step.fits else "memory"


def _next(rows: list[ScaledRow], row: ScaledRow, step: ScaledStep) -> str:
    """What twice the degree changes for a sequence: the larger of what communication and kernels add."""
    following = next((r for r in rows if r.tp == 2 * row.tp), None)
    then = _at(following, step.gpus) if following else None
    if following is None or then is None:
        return "refused" if following and following.refused else ""
    before, after = (
        (s.exposed / s.batch * r.tp, s.compute / s.batch * r.tp) for r, s in ((row, step), (following, then))
    )
    sends, kernels = after[0] - before[0], after[1] - before[1]
    if not then.fits:
        return "doesn't fit"
    slower = step.tokens / then.tokens - 1
    nodes = Group.of(cluster_of(GPU), following.tp).nodes
    if sends >= kernels:
        shares = f"{step.exposed / step.seconds:.0%} to {then.exposed / then.seconds:.0%}"
        why = f"exposed communication from {shares} of the step{f', over {nodes} nodes' if nodes > 1 else ''}"
    elif step.checkpointing != then.checkpointing:
        why = f"{then.checkpointing} checkpoints in place of {step.checkpointing}"
    else:
        why = f"kernels take {after[1] / before[1] - 1:.0%} longer for a sequence, as they are smaller"
    return f"{slower:.0%} slower: {why}"


_WHERE = """\
## Where tensor parallelism stops paying
On a given number of GPUs, more tensor parallelism sends more, over smaller products; it pays while it saves memory
(fewer checkpoints, or fitting at all), the gathers of FSDP (each replica gathers the whole model), or where replicas
are more than sequences. Of the tables above:
"""


def _stops(rows: list[ScaledRow]) -> Iterator[str]:
    for name in MODELS:
        own = [row for row in rows if row.model == name]
        found = [(gpus, best) for gpus in GPUS if (best := _best(own, gpus)) is not None]
        if found:
            told = ", ".join(f"tp {best[0].tp} on {gpus:,}{_half(own, *best)}" for gpus, best in found)
            crossing = [r for r in own if r.tp in (8, 16) and not r.refused]
            cliff = ""
            if len(crossing) == 2:
                one, two = (r.compute + r.exposed for r in crossing)
                cliff = f" From 8 GPUs of one node to 16 of two, a sequence is {one / two:.2f} × as fast."
            yield f"- {name}: {told}.{cliff}"
        elif own:
            yield f"- {name}: it fits none of these without pipeline or expert parallelism."


def _half(rows: list[ScaledRow], row: ScaledRow, step: ScaledStep) -> str:
    """What keeps from half of the best degree."""
    half = next((r for r in rows if r.tp * 2 == row.tp), None)
    held = _at(half, step.gpus) if half else None
    if half is None:
        return ""
    if held is None:
        return " (with half there are more replicas than sequences)"
    return f" (half is {step.tokens / held.tokens - 1:.0%} slower)" if held.fits else " (half doesn't fit)"


_PLOT = """
Of one sequence on tp GPUs, what communication takes against kernels. It grows with the degree, and of Llamas it is the
less the wider they are; beyond the eight GPUs of a node it goes by the network.

![Exposed communication against kernels, over the tensor parallel degree, of five models](scaling.svg)
"""
_MLP = """\
## One MLP
What tutorials on tensor parallelism tell of 4096 → 11008 → 4096 on 16 × 128 tokens in float32: 1.90 × on two GPUs,
about 3.5 × on four, 5 to 6 × on eight, half of the weights on each of two. `python -m tests.cost.mlp_table` prints it,
with correctness and sharding.
"""


def _measured(told: Mapping[str, str]) -> str:
    return (
        f"Compiled on {told['date']}: {told['processor']}, {told['cores']} cores, no GPU, load {told['load']}; "
        f"torch {told['torch']}, transformers {told['transformers']}."
    )


def read() -> tuple[list[ScaledRow], dict[str, str]]:
    """What was measured before."""
    if not ROWS.is_file():
        return [], {}
    plain = json.loads(ROWS.read_text(encoding="utf-8"))
    held: list[dict[str, Any]] = plain["rows"]
    for row in held:
        row["steps"] = tuple(ScaledStep(**step) for step in row["steps"])
    rows = [ScaledRow(**row) for row in held]
    return rows, plain["measured"]


def write(rows: list[ScaledRow], told: Mapping[str, str]) -> None:
    order = {name: place for place, name in enumerate(MODELS)}
    rows.sort(key=lambda row: (order[row.model], row.tp))
    lines = ",\n".join(f"  {json.dumps(_rounded(asdict(row)))}" for row in rows)
    ROWS.write_text(f'{{"measured": {json.dumps(told)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    PAGE.write_text(page(*read()), encoding="utf-8")
    PLOT.write_text(plot(read()[0]), encoding="utf-8")


def _rounded(held: Any) -> Any:
    if isinstance(held, float):
        return float(f"{held:.5g}")
    if isinstance(held, dict):
        return {key: _rounded(value) for key, value in held.items()}
    return [_rounded(item) for item in held] if isinstance(held, (list, tuple)) else held


def main(arguments: list[str]) -> None:
    rows, told = read()
    if arguments != ["--page"]:
        environment = describe_environment()
        told = {"date": datetime.now(UTC).date().isoformat(), "processor": environment.processor,
                "cores": str(environment.cores), "load": str(environment.load), **environment.versions}  # fmt: skip
        row_of("Llama 3.1 8B", 2, model_of("Llama 3.1 8B", num_hidden_layers=1))  # so that the first one isn't slower
        for name in arguments or MODELS:
            model = model_of(name)
            for tp in DEGREES:
                found = row_of(name, tp, model)
                print(f"{name}, tp {tp}: {found.refused or f'{found.compiling:.1f} s'}", file=sys.stderr, flush=True)
                rows = [row for row in rows if (row.model, row.tp) != (name, tp)] + [found]
                write(rows, told)
    write(rows, told)


if __name__ == "__main__":
    main(sys.argv[1:])

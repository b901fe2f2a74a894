"""The page of benchmarks, written from the raw results beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpplan.bench import BENCHMARKS
from tpplan.bench.result_tables import tables_of, verdicts

_HEAD = """\
# Benchmarks

Written by `tpplan bench --docs docs`; the raw figures are in [benchmarks/](benchmarks/). None of them needs a GPU: they
measure what tpplan itself adds, on torch's fake process group, whose collectives return at once; those of checkpoints,
of the loss, of overlap, of steps against the alternatives and of serving are of gloo processes. Triton kernels are
measured on a GPU, apart, and so is from which size on each pays: see [kernels.md](kernels.md). What the cost model
predicts stands beside published figures of GPUs, with its error, in [costs.md](costs.md#how-far-off-it-is).
"""
_ABOUT = {
    "collectives": """\
## Collectives

How many collectives a step issues, for a tiny model of each shipped plan's architecture: in each cell, in a forward
alone, and in a forward with its backward. A block's count is what a third block adds to a model of two. Counted with
torch's `CommDebugMode`; predicted by `Program.count_collectives`. The sum of parameters' gradients, which a
sequence-parallel plan needs once a backward, shows in the model's count and not in the block's.
""",
    "overhead": """\
## Overhead

A toy Llama (hidden size 64, intermediate size 128, 4 layers, 4 heads, vocabulary 256; 2 sequences of 16 tokens,
float32) at tp=2, seen from one rank, so small that nearly all time is Python's and torch's cost of an operator.
Milliseconds are processor time of one thread; ratios to the unsharded model are medians over interleaved rounds. A rank
has half of the arithmetic, which at these sizes is little. `parallelize_module` has the equivalent plan: colwise and
rowwise linears, the embedding split by rows, the head's result replicated, local outputs. transformers' own is
`from_pretrained(…, tp_plan="auto")`. Megatron's way by hand is the floor: linears that hold plain tensors, and the same
collectives. A prompt and the tokens after it are called as `generate` calls them, with a cache and a mask that grow:
tokens of a generation like one that ran before, and tokens that are the first at the length of their cache. A call of a
new length is held against the same call again, within a form; the conditions on sizes are found before, in the first
such call (see *Compile time*). The guard evaluates all premises of a call. As no numbers are exchanged, results mean
nothing here; the benchmarks below on real processes compare them.
""",
    "loop": """\
## The loop around the model

The same toy Llama: what a training loop does with gradients and parameters. Ratios are to the same on the unsharded
model, with torch's `clip_grad_norm_` there and `tpplan.clip_grad_norm_` on the sharded one. Optimizers are torch's; on
a sharded model they step on each rank's parts. What torch does on the same DTensors is shown beside it.
""",
    "compile": """\
## Compile time

`compile_plan` for the shape of Llama 3.1 405B (hidden size 16384, intermediate size 53248, 128 heads, 8 key-value
heads, vocabulary 128256) on `meta`, in a fresh process on one core. Imports, and a first compile of a one-layer model,
in which torch and transformers import what they put off, are measured apart. Columns named after passes are processor
time: capture runs the model on meta tensors, check runs it again on local shapes, build_regions finds equal layers,
solve places the reshards. A sequence-parallel plan takes two rounds of solve and check: the first finds that the
embedding's result can't be split, since the model reads the sequence's length from it. The conditions on sizes are no
part of it: they are found when a call of another size first comes, in the time beside it.
""",
    "checkpoint": """\
## Checkpoints

A Llama in bfloat16 (hidden size 2048, 17 layers) in safetensors files of up to 500 MiB, on gloo processes of one
machine, each with one thread. `load_weights` fills a model that was parallelized on `meta`; a plain read is a loop that
reads as many bytes, one after the other, into new memory. Times are wall time of the slowest rank, medians over
interleaved rounds with the files in the page cache; the ratio is taken within each round, with its quartiles. Before a
cold read the files are dropped from the page cache. Memory is what a rank alone holds and has changed
(`Private_Dirty`), over what it held before, sampled every 20 ms: of a load without its share and its largest tensor, of
a save whole. transformers' `from_pretrained(…, tp_plan="auto")` gets the same files; on a CPU it maps them, and reads
little of them until the model is used.
""",
    "loss": """\
## The loss

A forward and backward of a Llama in bfloat16 (hidden size 256, one layer, vocabulary 64000; a batch of 2) on gloo
processes of one machine, each with one thread. The loss of transformers is taken in float32, by labels; or of hidden
states and the head, by `tpplan.loss.linear_cross_entropy`. The peak is what a rank alone holds (`Private_Dirty`), over
what it held before the step, sampled every 2 ms.
""",
    "overlap": """\
## Collectives beside matrix products

A forward and backward with each choice of `overlap` (see [overlap.md](overlap.md)), of one Llama: hidden size 1024,
intermediate size 2816, 2 layers, 16 heads, vocabulary 512; 2 sequences of 512 tokens, float32, on gloo processes of one
machine, each with one thread. Milliseconds are the slowest rank's, medians over interleaved rounds; ratios to `none`
are taken within a round. `auto` is what pays on eight H100s, which at these sizes is little.

On the machine's own link the same cores compute and copy, so that nothing can be hidden that a core does: what is seen
there is what smaller products and more sends cost. On the slow link collectives end no earlier than one of 100 MB a
second would let them, and who waits for that sleeps, as where a network card sends. *Link busy* is what the collectives
of a step take, one after the other; *hidden* is the share of it for which a rank's Python didn't wait, the least of all
ranks. What passes while a rank waits for another one counts as hidden, so that without overlap there is some. With four
ranks on two cores each computes at half the speed.

The host's part: the toy of *Overhead* on a fake group, whose collectives return at once; processor time of one thread.
""",
    "alternatives": """\
## Against the alternatives

One Llama with the same weights in all its forms at once. The floor is Megatron's way written by hand
(`tpplan/bench/megatron.py`): the linears of the stock model are exchanged for some that hold plain tensors of a rank's
part, with nothing around them. `parallelize_module` has the equivalent plan, transformers its own (`tp_plan="auto"`;
its time *to parallelize* has a write and a read of the weights in it).

Steps: hidden size 512, intermediate size 1536, 4 layers, 8 heads, vocabulary 4096; 4 sequences of 128 tokens, float32,
on two gloo processes, each with one thread; on a machine with several GPUs on these, and larger. Wall time of the
slower rank, and processor time of its process, medians over interleaved rounds; ratios to the floor are taken within a
round. The loss is torch's, of whole logits in all forms; the optimizer is AdamW with `foreach`; a token is called as
`generate` calls it. Collectives and MiB are what a rank hands to them. *Peak* is what tensors take at once beside those
that were there, by torch's allocator. All forms are first held against the unsharded model.

Host overhead: the toy of *Overhead* above, on a fake process group. A rank's compute of one layer: Llama 70B's at tp 8
in bfloat16 on a GPU, whose collectives are a fake group's and take no time; without a GPU a layer a sixteenth as wide,
in float32. Ratios of these two are to the unsharded model.
""",
    "serving": """\
## Serving

A prompt, for its last token's logits, and the eight tokens after it, called as `generate` calls a model, on two gloo
processes, each with one thread: a toy Llama (hidden size 64, intermediate size 128, 4 layers, 4 heads, vocabulary 256,
prompts of 16 tokens), whose time is that of Python and of exchanging messages, and a wide one (hidden size 1024,
intermediate size 2816, 4 layers, 16 heads, vocabulary 8192, prompts of 128 tokens; float32).
The baseline is the unsharded model on one process alone, with one thread. The clock is that of the slower rank;
milliseconds, collectives and MiB (what a rank hands to them) are of a prompt, or of one token of each sequence; tokens
a second count those of a batch. Figures are medians over interleaved rounds, and ratios are taken within a round:
higher is better. A machine that does other work meanwhile slows the toy's processes most, as each waits for the other
at every collective; processor time suffers least. First all forms are held against the unsharded model, by their logits
of the prompt and of each token.
""",
    "requests": """\
## First requests

`generate` for a prompt of 16 tokens and 24 more, by the toy Llama above on two gloo processes: the first request of a
model that was just sharded, which proves each kind of call that comes and finds its conditions; the first after
`tpplan.warm_up`; later ones, medians; and one of the unsharded model on one process alone. All give the unsharded
model's tokens. Seconds by the clock of the slower rank.
""",
}

_GENERATION = """\
Generation: a prompt for its last token's logits, with a cache, and one token after it, for each shipped plan of a
causal model. Each is predicted by the program that such a call runs by, and counted as operators of c10d. *Around the
blocks* is what a model of two blocks takes beyond them: for a token the sum of a table split by rows and the gather
of the head's logits. *Least*: a token takes at most two all-reduces a block, and nothing else but these; where
attention and feed-forward start from the same hidden states, one sum is enough. An empty *as predicted*: experts
that no token is routed to aren't called, and fewer collectives are counted than predicted.
"""


def write_page(folder: Path, results: list[dict[str, Any]]) -> Path:
    """Write raw results to `folder`/benchmarks, and the page from all that lie there; returns the page."""
    raw = folder / "benchmarks"
    raw.mkdir(parents=True, exist_ok=True)
    for result in results:
        (raw / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=2) + "\n")
    files = [raw / f"{name}.json" for name in BENCHMARKS]
    page = folder / "benchmarks.md"
    page.write_text(render_page([json.loads(file.read_text()) for file in files if file.is_file()]))
    return page


def render_page(results: list[dict[str, Any]]) -> str:
    """The page in Markdown."""
    parts = [_HEAD]
    for result in results:
        parts.append(_ABOUT[result["benchmark"]])
        if any(row.get("of") == "generation" for row in result["rows"]):
            parts.append(_GENERATION)
        parts += [f"{table.markdown()}\n" for table in tables_of(result)]
        parts.append("".join(f"- {line}\n" for line in verdicts(result)))
        parts.append(f"{_where(result['environment'])}\n")
    return "\n".join(parts)


def _where(environment: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    gpu = "no GPU" if environment["gpu"] == "none" else environment["gpu"]
    return (
        f"Measured on {environment['date']}: {environment['processor']}, {environment['cores']} cores, {gpu}, load "
        f"{environment['load']}; Python {environment['python']}, {versions}."
    )

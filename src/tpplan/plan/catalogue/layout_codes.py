"""Codes of a plan that asks of a model what its modules cannot give."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity

LAYOUT_CODES: Final[tuple[CatalogueEntry, ...]] = (
    CatalogueEntry(
        code="TP101",
        name="style-mismatch",
        severity=Severity.ERROR,
        summary="The style doesn't fit the kind of module.",
        explanation="""
`colwise` and `rowwise` need a module with a weight of two dims, such as `nn.Linear` or transformers' `Conv1D`;
`vocab` needs an embedding, an `nn.EmbeddingBag`, or a bare parameter in which a body looks up rows. A style on a
container, such as a whole attention block, doesn't reach the modules inside it: name those.
""",
        bad="""
version: 1
modules:
  model.layers.*.self_attn: colwise
""",
        good="""
version: 1
modules:
  model.layers.*.self_attn.{q,k,v}_proj: colwise
""",
    ),
    CatalogueEntry(
        code="TP102",
        name="not-divisible",
        severity=Severity.ERROR,
        summary="Heads or features can't be divided evenly over the ranks.",
        explanation="""
Features and vocabularies need not be divisible by the size of the axis: the last ranks then hold fewer, or none, as
with `torch.chunk`. Heads needn't be divisible either (TP132), but they can't be cut: there have to be as many query
heads as ranks, as many features, and as many queries for each key head. Use fewer ranks, or leave the module
`replicate`.
""",
        bad="$ tpplan validate gpt2 --model hf:gpt2 --tp 16",
        good="$ tpplan validate gpt2 --model hf:gpt2 --tp 8",
    ),
    CatalogueEntry(
        code="TP103",
        name="heads-not-divisible",
        severity=Severity.ERROR,
        summary="The attention heads can't be split over the axis.",
        explanation="""
A query head lives on one rank, so there have to be as many query heads as ranks, even if the features could be split
further. Key and value heads that are fewer than the ranks are on several ranks each, next to the queries that use them.
That needs a body which repeats keys for their queries, or leaves that to torch; one that views the queries as groups,
(…, key heads, queries of each, …), is split by key heads, of which there have to be as many as ranks.
""",
        bad="$ tpplan validate gpt2 --model hf:gpt2 --tp 16",
        good="$ tpplan validate gpt2 --model hf:gpt2 --tp 8",
    ),
    CatalogueEntry(
        code="TP104",
        name="gathered-colwise",
        severity=Severity.WARNING,
        summary="A column-wise result is gathered, because nothing that reads it can work on shards.",
        explanation="""
The program is correct, but pays for an all-gather of the whole result; the message says how many bytes. A `colwise`
linear pays off where its result stays sharded until a `rowwise` one sums it away. The message names the layer that
could be `rowwise`, the layers that have to be `colwise` as well, or the operation that needs all columns; in that
case, remove the rule. If you want the gathered result, as for an `lm_head`, write `output: replicate`.
""",
        bad="""
version: 1
modules:
  lm_head: colwise
""",
        good="""
version: 1
modules:
  lm_head: {style: colwise, output: replicate}
""",
    ),
    CatalogueEntry(
        code="TP105",
        name="sliced-rowwise",
        severity=Severity.WARNING,
        summary="A row-wise module's input isn't sharded, so it's sliced.",
        explanation="""
The program is correct, but every rank computes the whole input and discards most of it. The message names the
linear layers that feed this one and are whole: make all of them `colwise`, so that each rank computes its own part. If
you want the slice, write `input: shard`.
""",
        bad="""
version: 1
modules:
  model.layers.*.mlp.down_proj: rowwise
""",
        good="""
version: 1
modules:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    ),
    CatalogueEntry(
        code="TP106",
        name="packed-projection",
        severity=Severity.ERROR,
        summary="A projection that packs several matrices is split across its packs.",
        explanation="""
The result of one linear is split or chunked into several, such as q|k|v or gate|up. Cut into equal parts, rank 0
would hold all of q and no v, and the model would run and be wrong. Name the packs in their order, so that each rank
takes its part of each; give their sizes where they differ. `tpplan suggest` finds them by itself.
""",
        bad="""
version: 1
modules:
  model.layers.*.mlp.gate_up_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
        good="""
version: 1
modules:
  model.layers.*.mlp.gate_up_proj: {style: colwise, packed: [gate, up]}
  model.layers.*.mlp.down_proj: rowwise
""",
    ),
    CatalogueEntry(
        code="TP109",
        name="shared-module-conflict",
        severity=Severity.ERROR,
        summary="The calls of a shared module need different reshards.",
        explanation="""
A module has one set of parameters and one place for its collectives, so every call of it is lowered the same way.
Here two calls get inputs, or need results, in different layouts; the message names both. Pin `input` and `output` to
one placement, make the module `replicate`, or use a separate module for each call.
""",
    ),
    CatalogueEntry(
        code="TP112",
        name="unsupported-module",
        severity=Severity.ERROR,
        summary="A module that can't be sharded as it is.",
        explanation="""
Some modules do what a shard can't: an embedding with `max_norm` writes to its weight in the forward, a forward that
was assigned to the instance bypasses the class, a weight that a hook computes isn't a parameter that the style could
split, and a hook on a parameter's gradient would be lost with the parameter that is replaced. A weight that a
parametrization of torch computes is split where its steps can work on parts: entry by entry, as products, or with sums,
as `weight_norm` takes them; not where each entry depends on all others, as in `spectral_norm` and `orthogonal`. The
message says which it is, and a note at which step. A parameter, a buffer or a tensor in an attribute may be of a class
that says itself what operations on it compute, as torchao's quantised weights are: what is proved of plain tensors
doesn't hold for it. Leave the module `replicate`, or remove what's in the way first.
""",
    ),
    CatalogueEntry(
        code="TP146",
        name="experts-not-whole",
        severity=Severity.ERROR,
        summary="Experts that can't be shared out whole.",
        explanation="""
With `experts`, each rank holds whole experts and runs those alone; the ranks' sums are the result, or each token goes
to the ranks with its experts, and the results come back. For experts that are stacked in one tensor this is proved if
the module is called with tokens, the numbers of the experts that were chosen for each, and their weights, and if its
result is a sum over the choices of what each chosen expert makes of the token. The message names the first operation
that isn't part of such a sum. For a list of modules, each expert must make a tensor of its input and nothing else: it
may draw no random numbers, and write to no buffer. Where that can't be had, split each expert inside: `colwise` and
`rowwise` on its matrices. Inside of experts with this rule, only `colwise` and `rowwise` have a meaning: where there
are more ranks than groups of experts, they split each expert over the ranks that share it. These exchange nothing
inside, so all of an expert has to be split, as columns and then as rows, its biases likewise. With
`exchange: all-to-all` the experts must be stacked and whole, and the tokens, choices and weights split along the
sequence: the norms around the mixture are `sequence`.
""",
        bad="""
version: 1
modules:
  model.layers.*.mlp: experts
""",
        good="""
version: 1
modules:
  model.layers.*.mlp.experts: experts
""",
    ),
    CatalogueEntry(
        code="TP147",
        name="exchange-inside",
        severity=Severity.WARNING,
        summary="A body exchanges a value between its operations.",
        explanation="""
An operation needs all of what a rank has a part of, and no module's boundary stands before it where that could be
gathered: one softmax over all experts' scores, a mix of attention heads, a norm over the features of all heads. The
body then runs from its record (TP124), and the value is gathered, or summed over the ranks, before that operation. It
is tried last, where a plan would be refused otherwise or a column-wise result would be gathered at a boundary for more;
and where the weight of a layer is computed, as the lengths of vectors that `weight_norm` normalizes are sums over the
ranks if each has a part of every vector. A weight itself is never gathered.
The message names the operation and its line, and how many bytes each rank sends; `tpplan explain` lists it with the
other reshards. The program is right. Whether the split is worth these bytes is yours to say: scores of attention grow
with the square of the length.
""",
        bad="""
version: 1
modules:
  moe.gate.weight: colwise       # scores = (x @ self.weight).softmax(-1), in the body of `moe.gate`
""",
        good="""
version: 1
modules:
  moe.experts.*.up: colwise      # the scores of all experts are few, and whole
  moe.experts.*.down: rowwise
""",
    ),
    CatalogueEntry(
        code="TP148",
        name="experts-not-split",
        severity=Severity.NOTE,
        summary="A rule inside of experts has nothing to split, as each expert lies on one rank.",
        explanation="""
Rules inside of experts that have the rule `experts` split each expert over the ranks of its group: n ranks and e
experts make as many groups as the greatest number that divides both. Where that is n, a group is one rank, and holds
its experts whole. The rules inside are for axes with more ranks than that; nothing is wrong.
""",
    ),
    CatalogueEntry(
        code="TP149",
        name="rule-without-effect",
        severity=Severity.ERROR,
        summary="A rule of the plan has no effect.",
        explanation="""
Every rule with a style that splits must show in the program: in a parameter of which each rank has a part, or in a
sequence that is split at the module. This one shows nowhere, so that less would be split than the plan says. Usual
causes: pins that leave nothing of the style, `sequence` on a module that is passed no sequence, and weights that a
layer computes in its forward, of which no parameter's dim can be followed to the features that are split. A layer that
the example call leaves out may stay whole if others of its pattern are split, and `sequence` on a module that it leaves
out waits for a call that has it.
""",
        bad="""
version: 1
modules:
  model.norm: {style: sequence, input: replicate}
""",
        good="""
version: 1
modules:
  model.norm: sequence
""",
    ),
    CatalogueEntry(
        code="TP150",
        name="kernel-unused",
        severity=Severity.WARNING,
        summary="A choice under `kernels` has no effect.",
        explanation="""
`triton` and `torch` say what is to become of bodies that a kernel could take the place of. There is none that this
choice is for: nothing in its modules computes what the kernel does, or only bodies that it doesn't fit, for the reason
that the message gives. `cross_entropy` is for losses of split classes. `residual_norm` is for norms of a sum that the
body around them makes, and is never taken without being asked for. Without a GPU, and outside of Triton's interpreter,
the model's own operations run whatever the plan says. `tpplan explain` lists every candidate. `auto` asks for nothing,
and is never reported.
""",
        bad="""
version: 1
modules:
  model.layers.*.mlp.up_proj: colwise
kernels:
  layer_norm: triton      # of a model whose norms are RMSNorms
""",
        good="""
version: 1
modules:
  model.layers.*.mlp.up_proj: colwise
kernels:
  rms_norm: auto
""",
    ),
    CatalogueEntry(
        code="TP151",
        name="operator-claim",
        severity=Severity.ERROR,
        summary="The rule of an operator isn't true of it.",
        explanation="""
No rule is trusted unseen. Before a program leans on one, the operator runs on random numbers, whole and in two and
three uneven parts along each dim that may be split or summed, forward and backward. The message names the dim, and what
differs. What can't be tried, such as a kernel for a GPU that isn't there, stands under `assumed` in the program.
""",
        bad="""
tpplan.register_operator("my::softmax", "b h -> b h")     # each entry depends on all others of `h`
""",
        good="""
tpplan.register_operator("my::softmax", "b h! -> b h!")
""",
    ),
    CatalogueEntry(
        code="TP114",
        name="pin-not-satisfiable",
        severity=Severity.ERROR,
        summary="An `input:` or `output:` pin can't be met.",
        explanation="""
The value at that boundary can't be brought to the placement that the plan asks for; the message says what it requires.
`sequence` needs a sequence dim that the axis divides, `shard` needs at least as many features as ranks, and a `rowwise`
module reads a part of the features, so its input can't be `replicate`. Remove the pin, and the compiler infers a
placement that works; `tpplan explain` shows which.
""",
        bad="""
version: 1
modules:
  model.rotary_emb: {style: replicate, output: shard}
""",
        good="""
version: 1
modules:
  model.rotary_emb: replicate
""",
    ),
    CatalogueEntry(
        code="TP135",
        name="unknown-attribute",
        severity=Severity.ERROR,
        summary="`local` names an attribute that the module doesn't have.",
        explanation="""
`local` lists integer attributes of the module, such as `num_heads`, that each rank has to see divided by the size of
the axis. The module has no such attribute, or it isn't an integer. Check the spelling; if the attribute belongs to the
module around it, write `local` in a rule for that one. Most attributes are found without `local`.
""",
        bad="""
version: 1
modules:
  model.layers.*.self_attn: {style: replicate, local: [num_heds]}
""",
        good="""
version: 1
modules:
  model.layers.*.self_attn: {style: replicate, local: [num_heads]}
""",
    ),
    CatalogueEntry(
        code="TP120",
        name="no-rules-for-parameters",
        severity=Severity.NOTE,
        summary="Parameters that no rule covers stay whole on every rank.",
        explanation="""
That's fine for small parameters such as norms, but large ones cost memory on every rank; the message says how much. A
`replicate` rule on the modules makes it explicit and silences the note.
""",
    ),
)

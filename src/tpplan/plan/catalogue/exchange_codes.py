"""Codes of plans that go to other libraries, or come from them."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity

EXCHANGE_CODES: Final[tuple[CatalogueEntry, ...]] = (
    CatalogueEntry(
        code="TP210",
        name="no-style",
        severity=Severity.ERROR,
        summary="What a plan does has no tensor-parallel style of transformers.",
        explanation="""
`tpplan export PLAN --to transformers` writes what the compiled program does: how each parameter is stored, and what
goes between ranks. Transformers stores linear layers of torch, embeddings and bare parameters by its styles; it leaves
attributes of modules, bodies and all other values as they are. A projection packed of three matrices, a count of heads
that the forward reads, a layer of another class and a bias that is split by heads can't be said there. Without a model,
a pattern with `**`, or with a `*` inside of a segment, can't be said either.
""",
        bad="$ tpplan export gpt2 --to transformers",
        good="$ tpplan export llama --to transformers",
    ),
    CatalogueEntry(
        code="TP211",
        name="layers-differ",
        severity=Severity.ERROR,
        summary="A plan shards equal layers differently, and transformers has one style for all of them.",
        explanation="""
Transformers looks a module's style up by its name with a `*` for the number of its layer. So no layer can have a style
of its own.
""",
        bad="""
version: 1
modules:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  model.layers.0.mlp.{gate,up,down}_proj: none
""",
        good="""
version: 1
modules:
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
""",
    ),
    CatalogueEntry(
        code="TP212",
        name="left-out",
        severity=Severity.NOTE,
        summary="A rule isn't exported, and the results are the same without it.",
        explanation="""
Sequence parallelism and the choice of kernels change memory and speed, but no result. No style of transformers says
them: its `sequence_parallel` is for a norm whose caller has split the sequence.
""",
        bad="$ tpplan export llama-sequence --to transformers",
        good="$ tpplan export llama --to transformers",
    ),
    CatalogueEntry(
        code="TP213",
        name="exported-unproved",
        severity=Severity.WARNING,
        summary="A plan is exported without a model, word by word.",
        explanation="""
With `--model`, the plan is compiled, and what the program does is held against what transformers' styles do. A shipped
plan is compiled for the architecture whose name it has. Without a model nothing is proved: attributes that count
heads, layers that aren't linear layers of torch, and results that have to be gathered aren't seen.
""",
        bad="$ tpplan export my.yaml --to transformers",
        good="$ tpplan export my.yaml --to transformers --model ./checkpoint",
    ),
    CatalogueEntry(
        code="TP214",
        name="not-for-all-readers",
        severity=Severity.NOTE,
        summary="Transformers reads a style that vLLM's transformers backend doesn't.",
        explanation="""
vLLM's backend reads `colwise`, `colwise_rep`, `rowwise`, `rowwise_rep` and `replicate` for linear layers. Tables and
heads it shards by itself, mixtures of experts too. A linear layer with any other style is whole there, and one that
expects split input then fails.
""",
        bad="$ tpplan export phi3 --to transformers",
        good="$ tpplan export llama --to transformers",
    ),
    CatalogueEntry(
        code="TP215",
        name="no-autotp-config",
        severity=Severity.ERROR,
        summary="A file has no AutoTP settings of DeepSpeed that say how layers are sharded.",
        explanation="""
`tpplan suggest --from-deepspeed FILE` reads DeepSpeed's JSON: `tensor_parallel` with a `partition_config`, or an
`injection_policy` (class: names of the layers whose results are summed), or a `tp_plan` in transformers' words.
`autotp_size` alone leaves the choice to DeepSpeed, which takes the model's own plan, if it has one. So does tpplan.
""",
        bad='{"tensor_parallel": {"autotp_size": 4}}      # for a model without a plan of its own',
        good="""
{"tensor_parallel": {"autotp_size": 4, "partition_config": {"use_default_specs": false, "layer_specs": [
  {"patterns": [".*\\\\.(o|down)_proj\\\\.weight$"], "partition_type": "row"},
  {"patterns": [".*\\\\.(q|k|v|up|gate)_proj\\\\.weight$"], "partition_type": "column"}]}}}
""",
    ),
    CatalogueEntry(
        code="TP216",
        name="autotp-entry",
        severity=Severity.ERROR,
        summary="An entry of an AutoTP config has no counterpart in a plan.",
        explanation="""
What is read of `layer_specs`: `patterns`, `partition_type` (`row`, `column`, `skip`), `gather_output`, `model_types`,
and a `shape` of (n, -1) or ((a, b, c), -1) along the first dim, which are the packs of a projection. Other shapes,
another `partition_dim`, and presets (`preset_model`, or `use_default_specs` with one) aren't.
""",
        bad='{"patterns": [".*\\\\.w1\\\\.weight$"], "shape": [8, -1, 4096], "partition_dim": 1}',
        good='{"patterns": [".*\\\\.gate_up_proj\\\\.weight$"], "partition_type": "column", "shape": [2, -1]}',
    ),
)

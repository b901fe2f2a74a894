"""Codes of what can go wrong between a plan and a model."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import Entry, Severity

MODEL_CODES: Final[tuple[Entry, ...]] = (
    Entry("TP101", "style-mismatch", Severity.ERROR, "The style doesn't fit the kind of module."),
    Entry("TP102", "not-divisible", Severity.ERROR, "A size isn't divisible by the size of the axis."),
    Entry(
        "TP103", "heads-not-divisible", Severity.ERROR, "The attention heads can't be shared out evenly over the axis."
    ),
    Entry(
        "TP104",
        "gathered-colwise",
        Severity.WARNING,
        "A column-wise result is gathered, since nobody can use it sharded.",
    ),
    Entry("TP105", "sliced-rowwise", Severity.WARNING, "A row-wise module's input isn't sharded, so it's sliced."),
    Entry(
        "TP106",
        "packed-projection",
        Severity.ERROR,
        "A projection that packs several matrices is split across its packs.",
    ),
    Entry("TP107", "body-not-local", Severity.ERROR, "A module's forward can't run on local shards."),
    Entry("TP108", "already-parallel", Severity.ERROR, "The model is parallel already."),
    Entry(
        "TP109",
        "shared-module-conflict",
        Severity.ERROR,
        "A module that's called several times is needed in ways that differ.",
    ),
    Entry("TP110", "capture-failed", Severity.ERROR, "The model itself failed on the example inputs."),
    Entry("TP111", "inputs-needed", Severity.ERROR, "No example inputs could be made for the model."),
    Entry("TP112", "unsupported-module", Severity.ERROR, "A module that can't be sharded as it stands."),
    Entry("TP113", "in-place-mutation", Severity.ERROR, "A forward writes in place through a view of a sharded value."),
    Entry("TP114", "pin-not-satisfiable", Severity.ERROR, "An `input:` or `output:` pin can't be met."),
    Entry("TP115", "mesh-mismatch", Severity.ERROR, "The plan's axis isn't in the mesh, or has the wrong size there."),
    Entry("TP116", "program-mismatch", Severity.ERROR, "The ranks compiled different programs."),
    Entry("TP117", "unproved-call", Severity.ERROR, "A call differs from the one for which the program was proved."),
    Entry("TP118", "uneven-sequence", Severity.ERROR, "A call's sequence can't be split evenly over the axis."),
    Entry(
        "TP119",
        "randomness-mixed",
        Severity.ERROR,
        "A forward draws random numbers for replicated and for sharded values alike.",
    ),
    Entry(
        "TP120", "no-rules-for-parameters", Severity.NOTE, "Parameters that no rule covers stay whole on every rank."
    ),
    Entry("TP121", "checkpoint-mismatch", Severity.ERROR, "The checkpoint doesn't fit the model."),
    Entry("TP122", "model-reference", Severity.ERROR, "The model that `--model` names can't be loaded."),
    Entry("TP199", "internal-error", Severity.ERROR, "A bug in tpplan."),
)

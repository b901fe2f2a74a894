"""Codes of losses over classes that are split."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity

LOSS_CODES: Final[tuple[CatalogueEntry, ...]] = (
    CatalogueEntry(
        code="TP165",
        name="loss-of-what",
        severity=Severity.ERROR,
        summary="A loss can't tell which part of the classes a rank's logits are.",
        explanation="""
A rank's part of the logits is a plain tensor, which doesn't say so. `tpplan.loss.cross_entropy` takes from `model=`, or
from `mesh=` and `classes=`, how the classes are shared out, and checks that the logits have the size of this rank's
part, or that of the whole. Otherwise the loss would be a number like any other, and wrong. Labels and weights of
classes are those of the whole vocabulary, on every rank.
""",
        bad="""
logits = model(ids).logits                      # of a head with `output: shard`
loss = tpplan.loss.cross_entropy(logits, labels)
""",
        good="""
logits = model(ids).logits
loss = tpplan.loss.cross_entropy(logits, labels, model=model)
""",
    ),
    CatalogueEntry(
        code="TP166",
        name="class-call-changed",
        severity=Severity.ERROR,
        summary="A body calls losses over split classes in another order than its proof.",
        explanation="""
Where a head has `output: shard`, the functions that the body calls on its logits (cross entropy, `nll_loss`,
`log_softmax`, `logsumexp`) run over the parts of all ranks. Which of them are such was proved for the example call, in
order; this call makes others. So no loss leaves the model.
""",
        bad="""
if random.random() < 0.5:                       # in the forward
    self.last = logits.logsumexp(-1)
loss = cross_entropy(logits, labels)
""",
        good="""
self.last = logits.logsumexp(-1)
loss = cross_entropy(logits, labels)
""",
    ),
)

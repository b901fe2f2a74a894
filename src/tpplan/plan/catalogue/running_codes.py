"""What can go wrong between the ranks while a sharded model runs."""

from __future__ import annotations

from typing import Final

from tpplan.plan.catalogue.entry import CatalogueEntry, Severity

RUNNING_CODES: Final[tuple[CatalogueEntry, ...]] = (
    CatalogueEntry(
        code="TP175",
        name="recompute-unknown",
        severity=Severity.ERROR,
        summary="An activation checkpoint can't tell which program its call ran by.",
        explanation="""
Calls of different kinds may run by different programs. An activation checkpoint recomputes by that of its own call,
which is remembered for some thousand changes from one kind to another, and for calls of one thread. The model has to
be in the state of the call still: the forward once more with another setting was never proved.
""",
        bad="""
kept = [model(batch) for batch in batches]          # 5000 of them, each followed by a call of another kind
sum(made.sum() for made in kept).backward()
""",
        good="""
for batch in batches:
    model(batch).sum().backward()
""",
    ),
    CatalogueEntry(
        code="TP176",
        name="lost-rank",
        severity=Severity.ERROR,
        summary="A collective failed, as another rank of the axis didn't take part.",
        explanation="""
A rank that dies or raises leaves the others in a collective, which ends when its connection does, or after the process
group's timeout. So does a rank that makes a call alone which is a collective: a forward, `full_tensor()`,
`save_weights`, `save_pretrained` or `get_model_state_dict(…, full_state_dict=True)`. The message has the errors of
other ranks that raised in a call of the model, or ended by an error; if there are none, the cause is the first error in
the other ranks' logs. With `TPPLAN_DEBUG=1` the ranks compare what they are about to do, and tell where they part.
""",
        bad="""
if rank == 0:
    tpplan.save_weights(model, "checkpoint")
""",
        good="""
tpplan.save_weights(model, "checkpoint")            # on every rank
""",
    ),
    CatalogueEntry(
        code="TP177",
        name="out-of-step",
        severity=Severity.ERROR,
        summary="Under `TPPLAN_DEBUG=1`: the ranks of an axis do different things.",
        explanation="""
All ranks of an axis compute one model together. They must make the same calls in the same order. The message has the
places at which the ranks are. Calls with different arguments, or in different modes, are a TP192.
""",
        bad="""
if rank == 0:
    print(model(batch).loss)                        # a call that the other ranks don't make
""",
        good="""
loss = model(batch).loss
if rank == 0:
    print(loss)
""",
    ),
    CatalogueEntry(
        code="TP178",
        name="wrong-placement",
        severity=Severity.ERROR,
        summary="Under `TPPLAN_DEBUG=1`: a value at a module's boundary isn't placed as the program says.",
        explanation="""
A replicated value, or its gradient, isn't the same on all ranks, or the ranks' parts of a sharded one don't fit. The
usual cause is a replicated parameter, a buffer or a random seed that differs between the ranks.
""",
        bad="""
torch.manual_seed(rank)                             # dropout on replicated values then differs
loss = model(batch).sum()
""",
        good="""
torch.manual_seed(0)
loss = model(batch).sum()
""",
    ),
    CatalogueEntry(
        code="TP179",
        name="other-collectives",
        severity=Severity.ERROR,
        summary="Under `TPPLAN_DEBUG=1`: a call ran other collectives than its program has.",
        explanation="""
The collectives of a forward are those of its program, and those of a backward no more than these. Code that calls a
module once more, or leaves one out, behind the proof's back changes them.
""",
        bad="""
layer.forward = lambda x: (stock(x), stock(x))[1]
""",
        good="""
tpplan.parallelize(model, plan)                     # after the change, so that it is part of what is proved
""",
    ),
)

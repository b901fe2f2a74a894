"""The sweep: suggest a plan for an architecture, compile it, and compare the sharded model with the unsharded one.

python -m tests.zoo.sweep llama bert    a line for each setting
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.zoo.architectures import ARCHITECTURES, build
from tests.zoo.subjects import SUBJECTS
from tpplan.compiler.ir.program import Program
from tpplan.parity.verification import verify_program
from tpplan.plan import CompileError, load_plan
from tpplan.suggest import search, write_plan
from tpplan.suggest.judge import plan_of
from tpplan.suggest.patterns import is_repeated, shape_of
from tpplan.suggest.sharded_share import Share, Whole, block_share, left_whole, model_share, shared_parts
from tpplan.suggest.write import reason_for

SIZES = (2, 4)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What came of one architecture at one size.

    Attributes:
        name, size, sequence: the setting; `sequence` is whether sequence parallelism was asked for.
        blocks, model: the sharded shares; None if it was refused.
        collectives: those that a layer needs, forward and backward.
        refused: what is refused or left whole, with the reason; empty if nothing of weight is.
        stream: whether the stream is split along the sequence.
        error: the largest relative error of an output or a gradient; None if nothing could be run.
        problems: everything that is wrong.
        freedoms: what the plan had to be allowed.
        seconds: of a processor that it took.
    """

    name: str
    size: int
    sequence: bool
    blocks: Share | None = None
    model: Share | None = None
    collectives: Counter[str] = field(default_factory=Counter[str])
    refused: tuple[str, ...] = ()
    stream: bool = False
    error: float | None = None
    problems: tuple[str, ...] = ()
    freedoms: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it is right, or was refused in one finding."""
        return not self.problems

    def __str__(self) -> str:
        """The outcome in a line."""
        setting = f"{self.name} tp={self.size}{' sequence' if self.sequence else ''}"
        if self.blocks is None:
            return f"{setting}: refused: {'; '.join((*self.refused, *self.problems))}"
        share = f"blocks {self.blocks.percent:.1f}%"
        verdict = "ok" if self.ok else "WRONG " + "; ".join(self.problems[:2])
        calls = ", ".join(f"{count} {what}" for what, count in sorted(self.collectives.items()))
        stream = " (no sequence)" if self.sequence and not self.stream else ""
        return f"{setting}: {share}{stream}, {calls}, error {self.error:.1e}, {self.seconds:.1f} s: {verdict}"


def build_any(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model of this name, and the positional arguments and the keywords of a call."""
    if name in ARCHITECTURES:
        model, keywords = build(name)
        return model, (), dict(keywords)
    return SUBJECTS[name].build(), *SUBJECTS[name].call()


def run(name: str, size: int, sequence: bool) -> Outcome:
    """Suggest, compile and compare."""
    began = time.process_time()
    model, arguments, inputs = build_any(name)
    try:
        found = search(model, size, arguments, inputs, sequence)
    except CompileError as error:
        first = error.diagnostics[0]
        reason = "; ".join((f"{first.code}: {first.message}", *first.notes[:1]))
        return Outcome(name, size, sequence, refused=(reason,), seconds=time.process_time() - began)
    program = found.program
    text = write_plan(found, name)
    problems: list[str] = []
    names = [held for held, _ in model.named_modules()]
    written, meant = (plan.match(names).rules for plan in (load_plan(text), plan_of(found.subject, found.settings)))
    if {n: r.settings for n, r in written.items()} != {n: r.settings for n, r in meant.items()}:
        problems.append("the written plan isn't the one that was found")
    dtype = torch.float32 if name in ARCHITECTURES else None  # float64, where the model runs in it
    parity = verify_program(model, program, (arguments, inputs), dtype=dtype)
    problems += parity.problems
    if parity.max_error > TOLERANCE:
        problems.append(f"an error of {parity.max_error:.1e}")
    refused = [f"`{whole.pattern}`: {reason_for(found, whole)}" for whole in _of_weight(left_whole(program), program)]
    shared = _of_weight(shared_parts(program), program)
    refused += [f"`{whole.pattern}`: some heads are used by several ranks, and stored on each" for whole in shared]
    if found.sequence:
        refused.append(f"sequence: {found.sequence}")
    return Outcome(
        name, size, sequence, block_share(program), model_share(program), _of_a_layer(program), tuple(refused),
        any(held.style.value == "sequence" for held in found.settings.values()), parity.max_error, tuple(problems),
        program.freedoms, time.process_time() - began,
    )  # fmt: skip


def _of_weight(held: list[Whole], program: Program) -> list[Whole]:
    least = 0.01 * model_share(program).total
    return [whole for whole in held if whole.matrices and whole.count >= least and is_repeated(whole.example)]


def _of_a_layer(program: Program) -> Counter[str]:
    """The collectives of the last block of the kind that has most."""
    blocks: dict[str, Counter[str]] = {}
    for module, reshard in program.reshards():
        parts = module.name.split(".")
        position = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if position is None:
            continue
        ways = [reshard.forward] + ([reshard.backward] if reshard.differentiable else [])
        counted = blocks.setdefault(".".join(parts[: position + 1]), Counter())
        for way in ways:
            counted[str(way)] += module.calls if way.communicates else 0
    kinds: dict[str, Counter[str]] = {shape_of(name): counted for name, counted in blocks.items()}
    return +max(kinds.values(), key=lambda counted: counted.total(), default=Counter())

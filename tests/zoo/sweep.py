"""The sweep: suggest a plan for an architecture, compile it, and compare the sharded model with the unsharded one.

python -m tests.zoo.sweep llama bert    a line for each setting
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from tests.zoo.architectures import build
from tpplan.compiler.program import Program
from tpplan.parity.run import verify_program
from tpplan.plan import CompileError, load_plan
from tpplan.suggest import search, write_plan
from tpplan.suggest.patterns import is_repeated, shape_of
from tpplan.suggest.share import Share, block_share, left_whole, model_share
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
        seconds: how long it took.
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
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it is right, or was refused in one finding."""
        return not self.problems

    def __str__(self) -> str:
        """The outcome in a line."""
        setting = f"{self.name} tp={self.size}{' sequence' if self.sequence else ''}"
        if self.blocks is None:
            return f"{setting}: refused: {'; '.join(self.refused)}"
        share = f"blocks {self.blocks.percent:.1f}%"
        verdict = "ok" if self.ok else "WRONG " + "; ".join(self.problems[:2])
        left = f" | {'; '.join(self.refused)}" if self.refused else ""
        calls = ", ".join(f"{count} {what}" for what, count in sorted(self.collectives.items()))
        stream = " (no sequence)" if self.sequence and not self.stream else ""
        return f"{setting}: {share}{stream}, {calls}, error {self.error:.1e}, {self.seconds:.1f} s: {verdict}{left}"


def run(name: str, size: int, sequence: bool) -> Outcome:
    """Suggest, compile and compare."""
    began = time.perf_counter()
    model, inputs = build(name)
    try:
        found = search(model, size, (), inputs, sequence)
    except CompileError as error:
        first = error.diagnostics[0]
        return Outcome(name, size, sequence, refused=(f"{first.code}: {first.message}",))
    program = found.program
    text = write_plan(found, name)
    problems: list[str] = []
    if {rule.settings for rule in load_plan(text).rules} != {rule.settings for rule in load_plan(text).rules}:
        problems.append("the written plan differs")
    parity = verify_program(model, program, ((), inputs), dtype=torch.float32)
    problems += parity.problems
    if parity.max_error > TOLERANCE:
        problems.append(f"an error of {parity.max_error:.1e}")
    left = [
        whole for whole in left_whole(program) if whole.matrices and whole.count >= 0.01 * model_share(program).total
    ]
    refused = [f"`{whole.pattern}`: {reason_for(found, whole)}" for whole in left if is_repeated(whole.example)]
    if found.sequence:
        refused.append(f"sequence: {found.sequence}")
    return Outcome(
        name, size, sequence, block_share(program), model_share(program), _of_a_layer(program), tuple(refused),
        any(held.style.value == "sequence" for held in found.settings.values()), parity.max_error, tuple(problems),
        time.perf_counter() - began,
    )  # fmt: skip


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
        counted.update({str(way): module.calls for way in ways if way.communicates})
    kinds: dict[str, Counter[str]] = {shape_of(name): counted for name, counted in blocks.items()}
    return max(kinds.values(), key=lambda counted: counted.total(), default=Counter())


def main(names: list[str]) -> int:
    """Print a line for each setting of each architecture."""
    wrong = 0
    for name in names:
        for size in SIZES:
            for sequence in (False, True):
                try:
                    outcome = run(name, size, sequence)
                    wrong += not outcome.ok
                    print(outcome, flush=True)
                except Exception as error:
                    wrong += 1
                    print(f"{name} tp={size} {sequence}: CRASH {type(error).__name__}: {str(error)[:300]}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

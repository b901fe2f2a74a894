"""The sweep: every operator, every choice of layouts for its operands, both spellings of each dim.

python -m tests.rules.sweep [ENTRY...] [--samples N] [--ranks N]     a line for each operator with something wrong
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.rules.calls import FOURIER, OPERATORS, Call, calls_of
from tests.rules.numbers import Fails, Subject, Wrong
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, Layout, Pack, packed, sharded
from tpplan.compiler.rules.propagate import Propagator, Refusal
from tpplan.ops.registry import TABLE

ENTRYWISE = tuple(name for name, operator in TABLE.items() if operator.kind == "entrywise")


@dataclass
class Tally:
    """What came of an operator's calls."""

    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    partial: int = 0


def layouts_of(tensor: Tensor, ranks: int, batch: int, packs: bool) -> list[Layout]:
    """The layouts that a tensor can have."""
    shape = tuple(tensor.shape)
    found = [REPLICATED]
    if tensor.is_floating_point() or tensor.is_complex():
        found.append(REPLICATED_PARTIAL)
    if tensor.dtype is not torch.bool:
        found.append(PARTIAL)
    found += [sharded(d) for d, n in enumerate(shape) if n >= ranks]
    if shape and batch > 1 and shape[0] % (batch * ranks) == 0:
        found.append(sharded(0, interleave=batch))
    if packs:
        for d, n in enumerate(shape):
            if n % (2 * ranks) == 0:
                found.append(packed(d, [Pack(n // 2)] * 2))
            if n > 2 * ranks and (n - ranks) % ranks == 0:
                found.append(packed(d, [Pack(n - ranks), Pack(ranks)]))
            if ranks == 4 and n % 2 == 0:
                found.append(packed(d, [Pack(n, 2)]))
    return found


def choices(subject: Subject, ranks: int, batch: int, packs: bool, limit: int) -> list[tuple[Layout, ...]]:
    """Layouts for the operands, not all of them replicated."""
    each = [layouts_of(t, ranks, batch, packs) for t in subject.operands]
    found = [c for c in itertools.islice(itertools.product(*each), 4000) if not all(held.is_replicated for held in c)]
    if len(found) <= limit:
        return found
    # Operands that lie alike are what most rules are about.
    found.sort(key=lambda layouts: len({held for held in layouts if not held.is_replicated}))
    alike, others = found[:limit], found[limit:]
    return [*alike[: limit * 2 // 3], *random.Random(0).sample(others, min(limit // 3, len(others)))]


def spellings(call: Call) -> Iterator[Call]:
    """The call, and the same with its dims by the other number."""
    yield call
    operand = next((a for a in call.arguments if isinstance(a, Tensor)), None)
    if operand is None or not operand.dim() or call.name in FOURIER:  # torch crashes on negative dims of transforms
        return
    names = [a.name for a in call.operator._schema.arguments]
    changed = list(call.arguments)
    for position, held in enumerate(call.arguments):
        if position >= len(names) or not names[position].startswith("dim"):
            continue
        rank = operand.dim() + (1 if call.name == "aten.unsqueeze.default" else 0)
        if isinstance(held, int) and not isinstance(held, bool):
            changed[position] = _other(held, rank)
        elif isinstance(held, (list, tuple)) and all(isinstance(d, int) for d in held):
            changed[position] = tuple(_other(d, rank) for d in held)
    if changed != list(call.arguments):
        yield Call(call.operator, tuple(changed), call.keywords)


def _other(dim: int, rank: int) -> int:
    return dim - rank if dim >= 0 else dim + rank


def sweep(
    names: Iterable[str], samples: int, ranks: int, limit: int = 60, packs: bool = False, most: int = 6
) -> dict[str, Tally]:
    """Try entries of the database; results are by aten operator."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    propagators = {batch: Propagator(ranks, batch) for batch in (1, 2, 3, 5)}
    seen: set[str] = set()
    for name in names:
        if os.environ.get("SWEEP_TRACE"):
            print(name, f"{time.time():.0f}", flush=True)
        for call in calls_of(name, samples):
            for spelled in spellings(call):
                tally = tallies[spelled.name]
                if spelled.key in seen or tally.counts["calls"] >= most:
                    continue
                seen.add(spelled.key)
                tally.counts["calls"] += 1
                try:
                    try_call(spelled, propagators, ranks, limit, packs, tally)
                except Exception as error:
                    tally.counts[f"harness {type(error).__name__}"] += 1
                    tally.counts["harness"] += 1
    return tallies


def try_call(call: Call, propagators: dict[int, Propagator], ranks: int, limit: int, packs: bool, tally: Tally) -> None:
    """Hold every accepted choice of layouts for one call against numbers."""
    subject = Subject(call)
    try:
        _ = subject.results
    except (RuntimeError, IndexError, ValueError, TypeError):
        return  # no call at all: a sample in place whose result has another shape
    batch = next((b for b in (2, 3, 5) if any(t.dim() and t.shape[0] % (b * ranks) == 0 for t in subject.operands)), 1)
    for layouts in choices(subject, ranks, batch, packs, limit):
        shown = f"({', '.join(map(str, layouts))})"
        try:
            found = subject.outcomes(propagators[batch], layouts)
        except Exception as error:
            tally.counts["raised"] += 1
            tally.wrong.append(f"{call.key} {shown} raised {type(error).__name__}: {error}")
            continue
        if isinstance(found, Refusal):
            tally.counts["refused"] += 1
            continue
        for outcome in found:
            tally.counts["accepted"] += 1
            try:
                subject.hold(layouts, outcome, ranks)
            except Fails:
                tally.counts["fails locally"] += 1
                continue
            except Wrong as error:
                made = ", ".join(map(str, outcome.outputs))
                tally.wrong.append(f"{call.key} {shown} -> {made}: {error}")
                tally.counts["wrong"] += 1
                if os.environ.get("SWEEP_TRACE"):
                    print("WRONG", tally.wrong[-1][:250], flush=True)
                continue
            tally.counts["right"] += 1
            tally.partial += any(held.forward == "P" for held in layouts)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--packs", action="store_true")
    given = parser.parse_args()
    began = time.time()
    tallies = sweep(
        given.names or (*OPERATORS, *ENTRYWISE), given.samples, given.ranks, given.limit, given.packs, given.most
    )
    for name, tally in sorted(tallies.items()):
        if tally.wrong:
            print(f"WRONG {name} {dict(tally.counts)}\n    " + "\n    ".join(t[:300] for t in tally.wrong[:3]))
    for name, tally in sorted(tallies.items()):
        if any(k.startswith("harness") for k in tally.counts):
            print(f"HARNESS {name} {dict(tally.counts)}")
    print("MISSED", *sorted(set(TABLE) - set(tallies)))
    right = sorted(name for name, t in tallies.items() if t.counts["right"] and not t.wrong)
    print("RIGHT", *right)
    print("PARTIAL", *sorted(name for name, t in tallies.items() if t.partial))
    print("NEVER", *sorted(name for name, t in tallies.items() if not t.counts["accepted"]))
    print(
        "FAILS",
        *sorted(f"{name}:{t.counts['fails locally']}" for name, t in tallies.items() if t.counts["fails locally"]),
    )
    total: Counter[str] = sum((t.counts for t in tallies.values()), Counter())
    print(len(tallies), "operators", dict(total), f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()

"""Outcomes: what the rules say of each operator of the table, for the choices of layouts of the sweep, without numbers.

in:  an entry of torch's operator database, or an operator of the table
out: a line for each call and choice of layouts: what comes of it, and a rank's own arguments

python -m tests.rules.outcomes [OPERATOR...]     the lines of these operators in full, to compare before and after
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.rules.calls import OPERATORS, SHAPED, Call, calls_of
from tests.rules.numbers import Subject
from tests.rules.sweep import ENTRYWISE, choices, spellings
from tpplan.compiler.ir.layout import Layout
from tpplan.compiler.ir.script import ReplayError
from tpplan.compiler.ir.trace import Operation
from tpplan.compiler.rewrite.local_steps import localised
from tpplan.compiler.rules.propagate import Propagator, Refusal

NAMES = (*OPERATORS, *ENTRYWISE, *SHAPED)
_RANKS = 4  # of which packs have replicas as well
_CALLS, _CHOICES = 6, 30


def lines_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The lines of each operator that these entries come down to, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    calls: dict[str, set[str]] = defaultdict(set)
    propagators = {batch: Propagator(_RANKS, batch) for batch in (1, 2, 3, 5)}
    for name in names:
        for call in calls_of(name, 8):
            for spelled in spellings(call):
                seen = calls[spelled.name]
                if spelled.key not in seen and len(seen) < _CALLS:
                    seen.add(spelled.key)
                    found[spelled.name] += _lines(spelled, propagators)
    return {name: sorted(set(lines)) for name, lines in sorted(found.items())}


def _lines(call: Call, propagators: dict[int, Propagator]) -> Iterator[str]:
    subject = Subject(call)
    try:
        _ = subject.results
    except (RuntimeError, IndexError, ValueError, TypeError):
        return  # no call at all
    sizes = [t.shape[0] for t in subject.operands if t.dim()]
    batch = next((b for b in (2, 3, 5) if any(n % (b * _RANKS) == 0 for n in sizes)), 1)
    for layouts in choices(subject, _RANKS, batch, True, _CHOICES):
        outcome = subject.outcomes(propagators[batch], layouts)
        shown = f"{call.key} of {_joined(layouts)}"
        if isinstance(outcome, Refusal):
            yield f"{shown}: refused, {outcome.kind}"
        else:
            made = (f"{_joined(o.outputs)} {local_arguments(subject, (*layouts, *o.outputs))}" for o in outcome)
            yield f"{shown}: {' or '.join(made)}"


def _joined(layouts: Sequence[Layout]) -> str:
    return f"({', '.join(map(str, layouts))})"


def local_arguments(subject: Subject, layouts: Sequence[Layout]) -> Any:
    """What a rank's own call is passed beside tensors."""
    node, values = subject.node
    whole = Operation(node.target, node.arguments, dict(node.keywords), node.inputs, node.outputs, (), None)
    try:
        run = localised(whole, SimpleNamespace(values=values), dict(enumerate(layouts)), _RANKS, 1)  # type: ignore
    except ReplayError as error:
        return str(error)
    return run.arguments, tuple(run.keywords.items())


def summary(name: str, lines: Sequence[str]) -> str:
    """An operator's lines in one: how many there are, how many of them are refusals, and a digest."""
    refused = sum(": refused, " in line for line in lines)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{name} {len(lines)} {refused} {digest[:12]}"


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name, lines in lines_of(NAMES).items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            print(*lines, sep="\n")


if __name__ == "__main__":
    main()

"""How far a right program may stray from the unsharded model: rounding errors, and no more.

A sharded program takes the same sums in another order. By the probabilistic analysis of Higham and Mary (A new approach
to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4), a sum of n terms rounds with a
relative error of at most λ·√n·u, for a unit roundoff u = ε/2, with a probability that is close to 1 for a small λ; and
errors of D steps that follow each other, being as independent, add up to √D of one. So

    tolerance = 8 · √D · (u + u' · √n)

with n the longest sum that an operation of the unsharded run took, D the number of leaf modules that it called (twice
that for gradients, which go there and back), u the roundoff of the coarsest dtype that an operation rounded to, and u'
that of the dtype in which sums accumulate: u itself, but float32's for float16 and bfloat16. λ = 8 leaves room for the
several operations of a module. Right programs were measured at a tenth of it or less, in float64, float32 and bfloat16
alike; a missing collective or a swapped shard makes an error of the order of 1, or of 1/N.

That takes errors to pass from step to step as they are. Where large numbers cancel, they grow: the gradients of queries
and keys under a softmax that is nearly even are what is left of a difference of equals. So where the bound is missed,
it is measured how far one unit in the last place of every product and sum moves a tensor of the stock model
(`rounding.py`), and where 8 times that explains all that is off, a note says so: right programs were measured at three
times it or less. It stays a problem, as no number of digits is promised there.

One thing isn't covered: a kink. Where rounding pushes the argument of a ReLU across zero, its gradient jumps. In
float64 that doesn't happen; in bfloat16 it does.

Errors are relative to the tensor's largest magnitude. Some gradients are zero but for rounding, such as that of a key
bias, which softmax cancels; so a gradient's scale is at least that of its module's other gradients, and at least a
thousandth of the largest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tpplan.parity.reference import UnshardedRun

_LAMBDA = 8.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds for relative errors.

    Attributes:
        outputs, gradients: the bounds.
        derivation: the formula with its numbers.
    """

    outputs: float
    gradients: float
    derivation: str


def bound_of(moved: float, scale: float, epsilon: float) -> float:
    """How far a tensor may stray, relative to `scale`, that roundings of the stock model move by `moved`."""
    bound = _LAMBDA * moved / scale if scale else 0.0
    return bound if bound <= math.sqrt(epsilon) else 0.0


def tolerance_for(reference: UnshardedRun) -> Tolerance:
    """The tolerance that the unsharded run's arithmetic warrants; see the module's docstring."""
    roundoff = reference.epsilon / 2
    accumulated = min(roundoff, torch.finfo(torch.float32).eps / 2)
    per_step = _LAMBDA * (roundoff + accumulated * math.sqrt(reference.terms))
    outputs = per_step * math.sqrt(reference.depth)
    gradients = per_step * math.sqrt(2 * reference.depth)
    inner = f"{roundoff:.1e} + {accumulated:.1e}·√{reference.terms}"
    derivation = f"8·√{reference.depth}·({inner}) for outputs, 8·√{2 * reference.depth}·(…) for gradients"
    return Tolerance(outputs, gradients, derivation)

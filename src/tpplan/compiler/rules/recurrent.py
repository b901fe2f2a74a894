"""Recurrent layers: each rank computes its features of the hidden state in each step, and then gathers all of them.

in:  a `Recurrence`, and the places of its arguments and results
out: the layouts that its arguments must have, and its results have; the hidden states that are gathered

    lstm(x: R·∂P, (h: S(2), c: S(2)))   ->   out: S(2), (h: S(2), c: S(2))     parameters: S(0), a pack to each gate

    gates_t = W_ih x_t + b_ih + W_hh gather(h_t-1) + b_hh       a rank's rows of each gate, from all of x and h
    c_t = f · c_t-1 + i · g,  h_t = o · tanh(c_t)               of a rank's features alone

Each rank's gates read all of x and of h, so that the gradients of these are partial; the gather of h is an all-gather,
and a reduce-scatter in the backward. The last state of the last layer is gathered by nobody but who reads the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tpplan.compiler.ir.layout import REPLICATED, REPLICATED_PARTIAL, Layout, Pack, packed, sharded
from tpplan.compiler.ir.replaced_bodies import Recurrence
from tpplan.compiler.ir.trace import Path

GATHERED = (sharded(1), REPLICATED_PARTIAL)
"""How the hidden state lies, (batch, features), before and after it is gathered."""


class Gathers(NamedTuple):
    """How often a layer's direction gathers its hidden state in a call.

    Attributes:
        suffix: what the names of its parameters end in.
        layer: its number.
        batch: how many sequences there are.
        times: this often.
    """

    suffix: str
    layer: int
    batch: int
    times: int


def taken_layouts(recurrence: Recurrence, paths: Iterable[Path], dims: int, differentiable: bool) -> tuple[Layout, ...]:
    """The layouts that an argument of so many dims, passed in these places, may have inside.

    Of a cell state, each rank needs its own features, which it takes of the whole if it must. A first state that is
    split is gathered by the body, once for all layers and directions.
    """
    whole, places = REPLICATED_PARTIAL if differentiable else REPLICATED, set(paths)
    if len(places) > 1 or ("input",) in places:
        return (whole,)
    return (sharded(dims - 1), whole)


def made_layout(recurrence: Recurrence, path: Path, dims: int) -> Layout:
    """How a result lies: of a layer's output, the features of each direction are shared out by themselves."""
    both = path == (0,) and not recurrence.cell
    return packed(dims - 1, (Pack(recurrence.features),) * (recurrence.directions if both else 1))


def gathers_first(recurrence: Recurrence, path: Path, held: Layout) -> bool:
    """Whether an argument that lies so is a hidden state that the body has to gather before its first step."""
    cell = recurrence.mode == "LSTM" and path == ("hx", 1)
    return path != ("input",) and not cell and held.is_sharded


def gathers(recurrence: Recurrence, shape: tuple[int, ...]) -> Iterator[Gathers]:
    """What the steps of a call gather, of an input of this shape; of the last layer, nobody reads the last state."""
    if recurrence.cell:
        return
    steps, batch = _steps_and_batch(recurrence, shape)
    for place, suffix in enumerate(recurrence.suffixes()):
        layer = place // recurrence.directions
        yield Gathers(suffix, layer, batch, steps if layer + 1 < recurrence.layers else steps - 1)


def _steps_and_batch(recurrence: Recurrence, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 2:
        return shape[0], 1
    return (shape[1], shape[0]) if recurrence.batch_first else (shape[0], shape[1])


__all__ = ["GATHERED", "Gathers", "gathers", "gathers_first", "made_layout", "taken_layouts"]

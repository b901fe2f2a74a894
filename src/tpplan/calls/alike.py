"""Alike: whether all ranks that share a model were called with the same arguments, in the same state.

    rank 0   model(ids)     ids = 4, 7, 1        a batch of its own on each rank: the outputs, and from there all
    rank 1   model(ids)     ids = 2, 2, 9        numbers, would be wrong on each without a word

Ranks exchange what they were called with before the first call of each kind runs, and before every call under
`TPPLAN_DEBUG=1` (`runtime/ranks/lockstep.py`). Later calls aren't compared otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from tpplan.calls.call_arguments import without_opaque
from tpplan.calls.decision import DecidedCall
from tpplan.compat.generators import random_state
from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compat.pipelines import wants_shapes_alone
from tpplan.compiler.ir.program import Program, dtype_name
from tpplan.compiler.ir.pytree import leaves
from tpplan.compiler.ir.trace import Path
from tpplan.compiler.trace.chance import NUMPY, PYTHON, states
from tpplan.plan import TpplanError
from tpplan.runtime.ranks.lockstep import Facts
from tpplan.runtime.ranks.watched_boundaries import checksum

_FLAGS = frozenset({bool, int, float, complex, str, bytes})
RANDOM_STATE = "the random state"
_STATE_OF = "the state of "
_NUMBERS = "#"  # before the digest of a tensor's numbers
_OWN = "#own "  # before that of a part's, which another rank's differs from


class DifferentInputsError(TpplanError):
    """The ranks that share a model called it with different arguments."""


def facts_of(
    call: DecidedCall, names: Sequence[str], program: Program | None = None, arriving: Collection[Path] = ()
) -> Facts:
    """What of a call must be the same on all ranks, each by its name.

    Numbers needn't where nobody reads what the call returns: torch's pipelining learns shapes from memory that holds
    something else on each rank.

    Args:
        call: this rank's.
        names: of the positional arguments.
        program: what it runs by, to have the state of the random generator among the facts if that draws.
        arriving: the paths of arguments of which each rank is passed its own part.
    """
    with torch.no_grad(), without_dispatch_modes(), without_function_modes():
        found = [("training", str(call.training)), *_arguments(call, names, arriving)]
    if wants_shapes_alone():
        found = [(name, held.partition(_NUMBERS)[0]) for name, held in found]
    found += [("the recording of gradients", _gradients()), ("autocast", _autocast())]
    found.append(("the default dtype", dtype_name(torch.get_default_dtype())))
    if program is not None and call.training and any(module.random for module in program.modules):
        drawn = torch.cuda.get_rng_state() if program.device.startswith("cuda") else random_state()
        found.append(("the state of the random generator", f"{_NUMBERS}{checksum(drawn):08x}"))
    return found


def drawn_next(generators: frozenset[str]) -> Facts:
    """What generators of random numbers draw next, by their names."""
    return [(f"{_STATE_OF}{name}", f"{_NUMBERS}{zlib.crc32(state):08x}") for name, state in states(generators)]


def refuse_different(every: Sequence[Facts]) -> None:
    """Raise if ranks were called with different arguments; on all of them, as all have the facts of all.

    Raises:
        DifferentInputsError: TP192.
    """
    for name, own in (fact for fact in every[0] if _OWN in fact[1] and len(every) > 1):
        if all((name, own) in other for other in every):
            raise DifferentInputsError.of(
                "TP192",
                f"the ranks of the axis are due their own parts of `{name}`, and were all passed the same tensor",
                help="pass what the stage before hands on, or take `input: sequence` from the layer that it goes to",
            )
    every = [[(name, held.partition(_OWN)[0]) for name, held in facts] for facts in every]
    for rank, other in enumerate(every):
        if other != every[0]:
            name, how = _first_difference(dict(every[0]), dict(other))
            raise DifferentInputsError.of(
                "TP192",
                f"ranks 0 and {rank} of the axis, which share one model, were called with different arguments: "
                f"`{name}` {how}",
                help=_seed(name) if name.startswith((RANDOM_STATE, _STATE_OF)) else _BATCHES,
            )


def _seed(state: str) -> str:
    seeds = {PYTHON: "random.seed(seed)", NUMPY: "numpy.random.seed(seed)"}
    seed = seeds.get(state.removeprefix(_STATE_OF), "torch.manual_seed(seed)")
    return f"seed all ranks of the axis alike before the call: `{seed}`, of which they draw the same numbers"


_BATCHES = (
    "give all ranks of the axis the same batches (the same order, seeds and random masks); only ranks on other axes of "
    "the mesh get batches of their own"
)


def _first_difference(first: dict[str, str], other: dict[str, str]) -> tuple[str, str]:
    for name in (*first, *other):
        ours, theirs = first.get(name), other.get(name)
        if ours is None or theirs is None:
            return name, f"is passed on {'one' if ours is None else 'the first'} of them alone"
        if ours != theirs:
            (kind, _, _), (another, _, _) = ours.partition(_NUMBERS), theirs.partition(_NUMBERS)
            return name, "has different numbers" if kind == another else f"is {kind} and {another}"
    return "", "are in another order"


def _arguments(call: DecidedCall, names: Sequence[str], arriving: Collection[Path]) -> Iterator[tuple[str, str]]:
    arguments, keywords = without_opaque(call.arguments, call.keywords)
    called = {names[i] if i < len(names) else f"*{i}": held for i, held in enumerate(arguments)}
    for name, held in sorted((called | keywords).items()):
        for path, item in leaves(held, (name,)):
            shown = str(path[0]) + "".join(f"[{step!r}]" for step in path[1:])
            if isinstance(item, Tensor):
                yield shown, _tensor(item, path in call.parts, path in arriving)
            elif type(item) in _FLAGS:
                yield shown, repr(item)


def _tensor(tensor: Tensor, is_part: bool, arrives: bool) -> str:
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    more = where + (" that requires grad" if tensor.requires_grad else "")
    form = f"a part of {dtype_name(tensor.dtype)}" if is_part else f"{dtype_name(tensor.dtype)}{tuple(tensor.shape)}"
    form += more
    if is_part and not arrives:
        return form
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return form
    try:
        if is_part and not _has_places(tensor):
            return form
        return f"{form}{_OWN if is_part else _NUMBERS}{checksum(tensor):08x}"
    except RuntimeError:  # of functorch, which shows nobody its numbers
        return form


def _has_places(tensor: Tensor) -> bool:
    """Whether places of a sequence differ, so that ranks' parts do."""
    return tensor.dim() > 1 and not bool((tensor == tensor[:, :1]).all())


def _gradients() -> str:
    if torch.is_inference_mode_enabled():
        return "off, in inference mode,"
    return "on" if torch.is_grad_enabled() else "off"


def _autocast() -> str:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return ", ".join(f"{dtype_name(torch.get_autocast_dtype(kind))} on {kind}" for kind in kinds) or "off"


__all__ = ["DifferentInputsError", "facts_of", "refuse_different"]

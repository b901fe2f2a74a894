"""Alike: whether all ranks that share a model were called with the same arguments, at the first call of each kind.

    rank 0   model(ids)     ids = 4, 7, 1        a batch of its own on each rank: the outputs, and from there all
    rank 1   model(ids)     ids = 2, 2, 9        numbers, would be wrong on each without a word

Ranks exchange a fingerprint of each argument once, before the first call of a kind runs. Later calls aren't compared.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tpplan.calls.arguments import without_opaque
from tpplan.calls.decision import Call
from tpplan.compat import without_dispatch_modes, without_function_modes
from tpplan.compiler.ir.pytree import leaves
from tpplan.parity.tree import Path
from tpplan.plan import TpplanError

_FLAGS = frozenset({bool, int, float, complex, str, bytes})
Fingerprints = dict[str, str]
"""Of what a call passes, by its path in words."""


class DifferentInputsError(TpplanError):
    """The ranks that share a model called it with different arguments."""


def require_alike(
    call: Call, names: Sequence[str], parts: Collection[Path], exchange: Callable[[Any], list[Any]]
) -> None:
    """Compare a call over the ranks; every rank raises if they differ.

    Args:
        call: this rank's.
        names: of the positional arguments.
        parts: the paths of tensors that are a rank's part, which differ.
        exchange: gives what each rank passed to it.

    Raises:
        DifferentInputsError: TP192.
    """
    with torch.no_grad(), without_dispatch_modes(), without_function_modes():
        every: list[Fingerprints] = exchange(fingerprints(call, names, parts))
    for rank, other in enumerate(every):
        if other != every[0]:
            name, how = _first_difference(every[0], other)
            raise DifferentInputsError(
                f"TP192 different-inputs: ranks 0 and {rank} of the axis, which share one model, were called with "
                f"different arguments: `{name}` {how}\n  help: give all ranks of the axis the same batches (the same "
                "order, seeds and random masks); only ranks on other axes of the mesh get batches of their own"
            )


def _first_difference(first: Fingerprints, other: Fingerprints) -> tuple[str, str]:
    for name in (*first, *other):
        ours, theirs = first.get(name), other.get(name)
        if ours != theirs:
            if ours is None or theirs is None:
                return name, f"is passed on {'one' if ours is None else 'the first'} of them alone"
            (kind, _, _), (another, _, _) = ours.partition("#"), theirs.partition("#")
            return name, "has different numbers" if kind == another else f"is {kind} and {another}"
    return "", ""


def fingerprints(call: Call, names: Sequence[str], parts: Collection[Path]) -> Fingerprints:
    """What each argument of a call is: its form, and a digest of its numbers."""
    found: Fingerprints = {"training": str(call.training)}
    arguments, keywords = without_opaque(call.arguments, call.keywords)
    called = [names[i] if i < len(names) else f"*{i}" for i in range(len(arguments))]
    for name, held in (*zip(called, arguments, strict=True), *keywords.items()):
        for path, item in leaves(held, (name,)):
            shown = str(path[0]) + "".join(f"[{step!r}]" for step in path[1:])
            if isinstance(item, Tensor):
                found[shown] = _tensor(item, path in parts)
            elif type(item) in _FLAGS:
                found[shown] = repr(item)
    return found


def _tensor(tensor: Tensor, is_part: bool) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if is_part:
        return f"a part of {kind}"
    form = f"{kind}{tuple(tensor.shape)}"
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
        return form
    if not tensor.numel() or tensor.is_quantized:
        return form
    try:
        numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        held = ctypes.string_at(numbers.data_ptr(), numbers.numel() * numbers.itemsize)
    except RuntimeError:  # of functorch, which shows nobody its numbers
        return form
    return f"{form}#{hashlib.blake2b(held, digest_size=8).hexdigest()}"


__all__ = ["DifferentInputsError", "fingerprints", "require_alike"]

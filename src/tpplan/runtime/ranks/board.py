"""Board: what the ranks of an axis tell each other beside their collectives, by the store at which they met.

    exchange    all ranks write what they have, and wait for each other: before the first call of a kind, and the like
    tell        one rank writes that it left a step, and why; read by those whose collective then fails

None of it is a collective, so whatever another rank is in the middle of, it can't be taken for a part of that. A step
in which nothing happens writes nothing.
"""

from __future__ import annotations

import pickle
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from tpplan.compat.modes import without_dispatch_modes, without_function_modes
from tpplan.compat.process_groups import default_store, group_timeout
from tpplan.plan import TpplanError

_met: dict[tuple[str, int], int] = {}
_left: set[int] = set()  # this process's rank, while it has
_LEFT = "tpplan/left"
_PATIENCE = 1.0  # seconds for which others may be late to say why


class LostRankError(TpplanError):
    """Another rank died, raised, or runs other collectives than this one."""


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether nothing is sent over a group."""
    return group is None or group.size() == 1 or dist.get_backend(group) == "fake"


def exchange(group: dist.ProcessGroup | None, what: str, held: Any) -> list[Any]:
    """What the ranks of `group` have, by rank; of this one alone where nothing is sent.

    Args:
        group: the ranks, which must all come here.
        what: where this rank is, for those who are elsewhere.
        held: what it has; pickled.

    Raises:
        LostRankError: another rank doesn't come, or comes to something else.
    """
    if group is None or is_alone(group):
        return [held]
    store, mine = default_store(), group.rank()
    if store is None:
        return _exchange_by_collective(group, held)
    topic = _topic(group)
    number = _met[topic, mine] = _met.get((topic, mine), 0) + 1
    keys = [f"{topic}/{number}/{rank}" for rank in range(group.size())]
    try:
        store.set(keys[mine], pickle.dumps((what, held)))
        store.wait(keys, group_timeout(group))
        said: list[tuple[str, Any]] = [pickle.loads(store.get(key)) for key in keys]
        if number > 1:  # which all have read that came here
            store.delete_key(f"{topic}/{number - 1}/{mine}")
    except RuntimeError as error:
        with suppress(RuntimeError):
            store.delete_key(keys[mine])  # nobody who comes later is to take this rank for one that waits
        raise lost(what, error, group) from error
    other = next((rank for rank, (place, _) in enumerate(said) if place != what), None)
    if other is not None:
        elsewhere = f"rank {dist.get_process_group_ranks(group)[other]} is at {said[other][0]}"
        raise LostRankError.of(
            "TP176",
            f"{what} failed, as {elsewhere}",
            help=_ALIKE,
        )
    if has_left():  # all ranks are here, whatever was before
        _left.clear()
        store.delete_key(f"{_LEFT}/{dist.get_rank()}")
    return [had for _, had in said]


def _exchange_by_collective(group: dist.ProcessGroup, held: Any) -> list[Any]:
    """As `exchange`, for backends that need no store."""
    found: list[Any] = [None] * group.size()
    with without_dispatch_modes(), without_function_modes():
        dist.all_gather_object(found, held, group=group)
    return found


# -- ranks that leave -------------------------------------------------------------------------------------------------
def tell(text: str) -> None:
    """Let the other ranks know that this one has left the step, and why."""
    try:
        store = default_store()
        if store is not None:
            _left.add(dist.get_rank())
            store.set(f"{_LEFT}/{dist.get_rank()}", text)
    except RuntimeError:  # the process that has the store is gone
        pass


def has_left() -> bool:
    """Whether this rank left a step, and hasn't met the others since."""
    return bool(_left) and dist.get_rank() in _left


def told(group: dist.ProcessGroup) -> dict[int, str]:
    """What other ranks of a group told that left the step, or wait for this one to come to an exchange; by rank."""
    found: dict[int, str] = {}
    try:
        store = None if is_alone(group) else default_store()
        if store is None:
            return found
        topic, mine = _topic(group), group.rank()
        for place, rank in enumerate(dist.get_process_group_ranks(group)):
            left, waits = f"{_LEFT}/{rank}", f"{topic}/{_met.get((topic, mine), 0) + 1}/{place}"
            if place != mine and store.check([left]):
                found[rank] = store.get(left).decode()
            elif place != mine and store.check([waits]):
                found[rank] = f"{_WAITS} {pickle.loads(store.get(waits))[0]}"
    except RuntimeError:
        pass
    return found


_WAITS = "waits at"
_BY_CHANCE = (
    "in a branch or a loop that random numbers decide: seed all ranks of the axis alike (`torch.manual_seed`, "
    "`random.seed`). TPPLAN_DEBUG=1 tells where the ranks part"
)
_ALIKE = f"let all ranks of the axis make the same calls in the same order, also {_BY_CHANCE}"


def lost(what: str, error: BaseException, group: dist.ProcessGroup | None) -> LostRankError:
    """The error for what failed with `error`, since another rank didn't take part in it."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reasons: dict[int, str] = {}
    if group is not None:
        reasons, until = told(group), time.monotonic() + _PATIENCE
        tell(f"waited in vain for others at {what}")
        while not reasons and time.monotonic() < until:
            time.sleep(0.05)
            reasons = told(group)
    came = "didn't come in time" if "imed out" in text or "imeout" in text else "stopped or left the step"
    if reasons and all(reason.startswith(_WAITS) for reason in reasons.values()):
        way_out = _ALIKE
    elif reasons:
        way_out = "see the other ranks' logs, which have these errors whole"
    else:
        way_out = (
            "look for the first error in the other ranks' logs; if there is none, a rank was killed, or makes calls "
            "that the others don't: a forward, or `full_tensor`, `save_weights`, `save_pretrained` or "
            f"`get_model_state_dict` under `if rank == 0`, or {_BY_CHANCE}"
        )
    notes = [*(f"rank {rank} {reason}" for rank, reason in reasons.items()), text]
    return LostRankError.of("TP176", f"{what} failed, as another rank of the axis {came}", help=way_out, notes=notes)


def _topic(group: dist.ProcessGroup) -> str:
    return f"tpplan/{group.group_name}/{'.'.join(map(str, dist.get_process_group_ranks(group)))}"


__all__ = ["LostRankError", "exchange", "has_left", "is_alone", "lost", "tell", "told"]

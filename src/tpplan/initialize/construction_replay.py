"""The replay of a construction: each draw in its order, each tensor for as long as it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tpplan.initialize.construction import Construction
from tpplan.initialize.executor import Executor, Tape
from tpplan.initialize.schedule import schedule


def replay(construction: Construction, take: Mapping[str, Callable[[Tensor], None]]) -> None:
    """Make the stock model's tensors one after the other.

    Args:
        construction: what to do.
        take: what takes each tensor, by name, as soon as it is ready; the tensor isn't kept.

    The generators end where the construction leaves them; where it fails, they are as they were before.
    """
    tapes = _tapes(construction)
    executor = Executor(construction.storages, tapes)
    try:
        with torch.no_grad():
            _run(construction, executor, take)
        for tape, source in zip(tapes.values(), construction.sources, strict=True):
            tape.jump(source.end)
    except BaseException:
        for source in construction.sources:
            source.generator.set_state(source.start)
        raise


def _tapes(construction: Construction) -> dict[int, Tape]:
    returns = {source.end for source in construction.sources if isinstance(source.end, int)}
    for operation in construction.operations:
        if operation.draw is not None and isinstance(operation.draw.jump, int):
            returns.add(operation.draw.jump)
    return {
        number: Tape(source.generator, {} if source.fresh else {0: source.start}, 0, returns)
        for number, source in enumerate(construction.sources)
    }


def _run(construction: Construction, executor: Executor, take: Mapping[str, Callable[[Tensor], None]]) -> None:
    operations = construction.operations
    last = {storage: index for index, operation in enumerate(operations) for storage in operation.writes}
    names: dict[int, list[str]] = {}
    for name in take:
        names.setdefault(construction.tensors[name].storage, []).append(name)

    def ready(storage: int) -> None:
        for name in names.get(storage, ()):
            take[name](executor.tensor(construction.tensors[name]))

    wanted: dict[int, set[int]] = {}
    for storage in names:
        if storage in last:
            wanted.setdefault(last[storage], set()).add(storage)
        else:
            ready(storage)
            executor.free(storage)
    drawn = {index for index, operation in enumerate(operations) if operation.draw is not None}
    for step in schedule(operations, wanted, drawn, {}).steps:
        if step.runs:
            executor.run(operations[step.place])
        for storage in sorted(wanted.get(step.place, ())):
            ready(storage)
        for storage in step.frees:
            executor.free(storage)


__all__ = ["replay"]

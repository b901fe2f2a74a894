"""Wrapped: models that were compiled before they are parallelized.

    model = torch.compile(model);  tpplan.parallelize(model, plan)

A plan knows the stock model's names, which have no compiled modules in them. So these are taken out for a while.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from tpplan.compat.dynamo import compiled_inside, read_anew, uncompiled
from tpplan.compat.modules import own_modules


@contextmanager
def bare(model: nn.Module) -> Generator[nn.Module]:
    """A block in which `model`, which is what it gives, has no module in it that `torch.compile` has returned.

    Afterwards they are back in their places, and compile what the modules inside have become.
    """
    stock: nn.Module = uncompiled(model)
    inside = compiled_inside(stock)
    for owner, name, compiled in inside:
        own_modules(owner)[name] = uncompiled(compiled)
    try:
        yield stock
    finally:
        for owner, name, compiled in inside:
            own_modules(owner)[name] = compiled
        for compiled in (*([] if stock is model else [model]), *(held for _, _, held in inside)):
            read_anew(compiled)


__all__ = ["bare"]

"""Stock again: modules whose weights were taken apart, with weights of their classes, made of the same parts.

in:  modules that have inner tensors for parameters
out: the modules as the user wrote them: what is captured, and what a sharded model is compared with
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import nn

from tpplan.compat.modules import give_class, own_parameters
from tpplan.compiler.ir.assembly import assemblies_of

Table = dict[str, nn.Parameter | None]


def put_together(modules: Iterable[nn.Module]) -> None:
    """Give modules that were taken apart, or copies of them, their weights back, of their classes."""
    for module in modules:
        assemblies, table = assemblies_of(module), own_parameters(module)
        of = {part: held for held in assemblies.values() for part in held.parts.values()}
        entries = Table()
        for leaf, parameter in table.items():
            if leaf not in of:
                entries[leaf] = parameter
            elif of[leaf].leaf not in entries:
                entries[of[leaf].leaf] = getattr(module, of[leaf].leaf)
        if assemblies:
            give_class(module, type(module).__mro__[1])
            fill(table, entries)


@contextmanager
def stock_again(modules: Iterable[nn.Module]) -> Generator[None]:
    """A block in which modules that were taken apart are as they were, of the same parts: what is proved is that."""
    apart = [(module, type(module), dict(own_parameters(module))) for module in modules if assemblies_of(module)]
    try:
        put_together(module for module, *_ in apart)
        yield
    finally:
        for module, kind, table in apart:
            give_class(module, kind)
            fill(own_parameters(module), table)


def fill(table: Table, entries: Table) -> None:
    """Have a table of a module hold these entries, in their order, and no others."""
    table.clear()
    table.update(entries)


__all__ = ["Table", "fill", "put_together", "stock_again"]

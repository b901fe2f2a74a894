# pyright: reportPrivateUsage=false
"""Sizes as symbols, and the expressions that come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import sympy
import torch
from torch._guards import SLoc
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SizeSymbols(ShapeEnv):
    """Sizes that stand for any number from 2 on, and the conditions that Python's and torch's code puts on them.

    Two sizes of an example that are equal by chance are two symbols, as else that would be a condition which nobody
    sees. 0 and 1 steer broadcasting, and stay numbers.

    Attributes:
        where: the line to name for conditions, in place of the one that is running.

    For every torch.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        """Have none; `line` tells the line of the user's code that is running."""
        super().__init__(duck_shape=False, specialize_zero_one=True)
        self._line = line
        self.where = ""

    def symbol(self, name: str, example: int) -> Any:
        """A size, of this value in the example."""
        from torch._dynamo.source import ConstantSource  # half a second, for those who have sizes as symbols

        source = ConstantSource(name)
        made = self.create_symbol(example, source, DimDynamic.DYNAMIC)
        return self.create_symintnode(made, hint=example, source=source)

    def conditions(self) -> list[tuple[Any, str]]:
        """What was compared, as expressions, and the line that did it."""
        return [(guard.expr, guard.sloc.maybe_user_loc or "") for guard in self.guards]

    def create_unbacked_symint(self, *args: Any, **options: Any) -> Any:
        """Refuse: nothing is known of a size that is found in a tensor."""
        raise NotImplementedError("a size is found in a tensor")

    create_unbacked_symfloat = create_unbacked_symbool = create_unbacked_symint

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:
        return SLoc(None, self.where or self._line()), ""


def expression_of(number: Any) -> Any:
    """What a size, or a number made of sizes, is in terms of symbols; a plain number of what is one.

    For every torch.
    """
    return cast("Any", number).node.expr if isinstance(number, SYMBOLIC) else number


def given_expression(number: Any) -> Any:
    """As `expression_of`, before conditions have made numbers of symbols. For every torch."""
    return cast("Any", number).node._expr if isinstance(number, SYMBOLIC) else number


def hint_of(number: Any) -> Any:
    """The value of a size in the example; no condition is made of it. For every torch."""
    return cast("Any", number).node.hint if isinstance(number, SYMBOLIC) else number


def as_python(expression: Any) -> str:
    """An expression over symbols as Python, of their names. For every torch."""
    return PythonPrinter().doprint(expression) if isinstance(expression, sympy.Basic) else repr(expression)

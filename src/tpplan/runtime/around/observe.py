"""Observe: hooks that see whole tensors, where torch's own see what a rank holds.

    tpplan.observe(model.layers[0].mlp, lambda module, args, output: norms.append(output.norm()))

Such a hook can't change what it sees, so calls needn't be proved with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tpplan.compat.modes import without_function_modes
from tpplan.compiler.ir.layout import REPLICATED, Layout, reshard_between
from tpplan.compiler.ir.pytree import Walk
from tpplan.compiler.trace.signatures import argument_names
from tpplan.plan import TpplanError
from tpplan.plan.taken import FLAG, FUNCTION, takes
from tpplan.runtime.modules.writes import WRITES, Outside, Writes, stock_class
from tpplan.runtime.ranks.reshard import make_reshard
from tpplan.taken_models import MODEL

Path = tuple[str | int, ...]
_ELSEWHERE = "observe a module around or inside of it"


class ObserveError(TpplanError):
    """It isn't known how a value lies that is to be observed."""


@takes(module=MODEL, hook=FUNCTION, backward=FLAG, with_kwargs=FLAG)
def observe(
    module: nn.Module, hook: Callable[..., object], *, backward: bool = False, with_kwargs: bool = False
) -> RemovableHandle:
    """Call `hook` with whole tensors at each call of a module of a sharded model, or each time it is differentiated.

    Every rank must observe alike, as the tensors are gathered. They are copies, without gradients, and what the hook
    returns is ignored. An activation checkpoint that runs the module once more calls the hook once more.

    Args:
        module: a module of a model, sharded or stock.
        hook: called as torch's: `hook(module, args, output)`, or `hook(module, grad_input, grad_output)`.
        backward: whether it is called with gradients.
        with_kwargs: whether it is called as `hook(module, args, kwargs, output)`; not in the backward.

    Returns:
        A handle, whose `remove()` takes the hook away.

    Example:
        >>> model = tpplan.parallelize(model, "auto", inputs=x)
        >>> handle = tpplan.observe(model.up, lambda module, args, output: print(tuple(output.shape)))
        >>> y = model(x)
        (4, 32)
        >>> handle.remove()
    """
    # What tpplan registers is no part of what is proved.
    if backward:
        return nn.Module.register_full_backward_hook(module, functools.partial(_in_backward, hook))
    seen = functools.partial(_in_forward, hook, with_kwargs)
    return nn.Module.register_forward_hook(module, seen, with_kwargs=True)


def _in_forward(
    hook: Callable[..., object], with_kwargs: bool, module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    with torch.no_grad(), without_function_modes():
        look = _Look(module)
        names = argument_names(stock_class(module).forward)
        given = tuple(look.whole(held, (names[i] if i < len(names) else f"*{i}",), True) for i, held in enumerate(args))
        named = {name: look.whole(held, (name,), True) for name, held in kwargs.items()}
        hook(module, *((given, named) if with_kwargs else (given,)), look.whole(output, (), False))


def _in_backward(hook: Callable[..., object], module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    with torch.no_grad():
        look = _Look(module, gradients=True)
        names = argument_names(stock_class(module).forward)
        into = tuple(look.whole(held, (names[i],), True) for i, held in enumerate(grad_input))
        single = len(grad_output) == 1 and not any(b.path == (0,) for b in look.boundaries if not b.inward)
        out = tuple(look.whole(held, () if single else (i,), False) for i, held in enumerate(grad_output))
        hook(module, into, out)


class _Look:
    """How values lie around a module, in one call of a hook."""

    def __init__(self, module: nn.Module, gradients: bool = False) -> None:
        writes: Writes | None = module.__dict__.get(WRITES)
        outside = None if writes is None or writes.outside is None else writes.outside(module)
        self._outside: Outside | None = outside
        self._gradients = gradients
        self.boundaries = () if outside is None else outside.program.boundaries.get(outside.name, ())
        if outside is not None and outside.name in outside.program.varied:
            raise ObserveError.of(
                "TP178",
                f"`{outside.name}` is called several times with values that lie differently, so that it isn't known "
                "which these are",
                help=_ELSEWHERE,
            )

    def whole(self, held: Any, path: Path, inward: bool) -> Any:
        """A container with whole tensors in it."""
        return Walk(lambda at, item: self._tensor(item, at, inward) if isinstance(item, Tensor) else item)(held, path)

    def _tensor(self, tensor: Tensor, path: Path, inward: bool) -> Tensor:
        found = next((b for b in self.boundaries if b.inward == inward and path in (b.path, *b.aliases)), None)
        if found is None or self._outside is None:
            return tensor.detach().clone()
        layout = _of_gradient(found.layout) if self._gradients else found.layout
        if layout.tail:
            raise ObserveError.of(
                "TP178",
                f"`{self._outside.name}` is called for its last tokens alone, and hands out no more of a sequence that "
                "is split",
                help=_ELSEWHERE,
            )
        ways = reshard_between(layout, REPLICATED)
        if ways is None or layout.forward == "R":
            return tensor.detach().clone()
        handed_out = self._outside.handed_out
        move = make_reshard(
            layout, REPLICATED, ways.forward, ways.backward, handed_out.axis, False, handed_out.context, found.shape
        )
        return move(tensor.detach())


def _of_gradient(layout: Layout) -> Layout:
    """How the gradient lies that arrives for a value."""
    if layout.is_sharded:
        return layout
    return REPLICATED if layout.gradient == "R" else Layout("P", "R")


__all__ = ["ObserveError", "observe"]

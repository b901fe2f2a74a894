"""Effects: what a forward leaves behind besides its results, such as an auxiliary loss in an attribute.

in:  the modules after a run, the values of the trace, their layouts
out: the tensors that modules now hold; findings for those that are only a rank's part

    self.usage = x.sum()   with x: S(1)   ->   TP107: the attribute would hold a rank's own sum
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from tpplan.compat import named_modules, own_buffers
from tpplan.compiler.layout import REPLICATED, Layout
from tpplan.plan import Diagnostic


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the modules' buffers and attributes, also in lists and dicts there, with the attributes' names."""
    for name, module in named_modules(model):
        for leaf, held in (*own_buffers(module).items(), *vars(module).items()):
            if leaf in ("_parameters", "_buffers", "_modules"):
                continue
            for tensor in _tensors_in(held):
                yield f"{name}.{leaf}" if name else leaf, tensor


def _tensors_in(held: object) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, (list, tuple)):
        yield from (item for item in held if isinstance(item, Tensor))  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(held, dict):
        yield from (item for item in held.values() if isinstance(item, Tensor))  # pyright: ignore[reportUnknownVariableType]


def effect_findings(kept: Mapping[int, str], layouts: Mapping[int, Layout]) -> list[Diagnostic]:
    """Report attributes that wouldn't hold what they hold in the unsharded model."""
    return [
        Diagnostic(
            code="TP107",
            message=f"the forward leaves a tensor in `{name}`, which lies {layouts[value]} there: it isn't what the "
            "unsharded model would leave, in its numbers or in its gradient",
            help="return the tensor from the forward, or pin `output: replicate` for the module that it comes from",
            subject=name.rpartition(".")[0] or None,
        )
        for value, name in kept.items()
        if layouts.get(value, REPLICATED) != REPLICATED
    ]


__all__ = ["effect_findings", "held_tensors"]

"""A plain model without a `build`: its modules are reset one after the other, where that is how it was initialised.

That holds for torch's own modules: each resets itself when it is made, children before their parent. And it holds for
the user's classes if their constructors only put such modules together, in the order in which they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tpplan.compat.modules import named_modules, own_buffers, own_modules, own_parameters
from tpplan.initialize.assembling import why_not_plain
from tpplan.initialize.findings import BUILD, UNKNOWN, problem
from tpplan.runtime.modules.writes import WRITES

# Torch's own with children that are no more than their children, or reset themselves after them. Not among them are
# `nn.Transformer`, which resets all of its matrices again, and the stacks of its layers, which are copies of one layer.
_ASSEMBLED = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
StockClass = Callable[[nn.Module], type[nn.Module]]


def unknown_modules(model: nn.Module, stock_class: StockClass) -> None:
    """Refuse a model with modules whose initialisation isn't known.

    Raises:
        InitializationError: TP143, with all of them.
    """
    reasons: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for prefix, module in named_modules(model):
        reason = _why_unknown(module, stock_class(module))
        if reason:
            reasons.setdefault(f"`{stock_class(module).__name__}`: {reason}", []).append(prefix or "the model itself")
    for prefix, module in named_modules(model, remove_duplicate=False):
        for leaf, tensor in own_parameters(module).items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            if tensor is not None and first.setdefault(id(tensor), name) != name and id(module) not in first:
                reasons.setdefault("tied parameters: it isn't known which of them was drawn", []).append(name)
        first.setdefault(id(module), prefix)
    if reasons:
        count = sum(len(names) for names in reasons.values())
        raise problem(
            UNKNOWN,
            f"it isn't known how {count} of the model's modules are initialised",
            BUILD,
            *(f"{reason} ({_listed(names)})" for reason, names in reasons.items()),
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _why_unknown(module: nn.Module, kind: type[nn.Module]) -> str:
    """Why a module's initialisation isn't known; empty if it is."""
    if kind.__module__.startswith("torch.nn."):
        if own_modules(module) and kind not in _ASSEMBLED:
            return "it does more to the modules in it than make them"
        if _has_tensors(module) and _resets(kind) is None:
            return "it has parameters or buffers, and no `reset_parameters`"
        return ""
    children = {name: child for name, child in own_modules(module).items() if child is not None}
    drawn = (name for name, child in children.items() if any(map(_has_tensors, child.modules())))
    reason = why_not_plain(kind, frozenset(children), frozenset(drawn))
    if reason:
        return reason
    base = next(base for base in kind.__mro__ if base.__module__.startswith("torch.nn."))
    if base is nn.Module and _has_tensors(module):
        return "it has parameters or buffers of its own"
    if base is not nn.Module and own_modules(module) and base not in _ASSEMBLED:
        return "it does more to the modules in it than make them"
    return ""


def _has_tensors(module: nn.Module) -> bool:
    return any(held is not None for held in (*own_parameters(module).values(), *own_buffers(module).values()))


def _resets(kind: type[nn.Module]) -> Callable[[nn.Module], object] | None:
    return getattr(kind, "reset_parameters", None) or getattr(kind, "_reset_parameters", None)


def reset_twin(model: nn.Module, stock_class: StockClass) -> nn.Module:
    """A stock twin of the model, each of whose modules has reset itself."""
    twins: dict[int, nn.Module] = {}
    root = _twin(model, stock_class, twins, {})
    for module in _children_first(root, set()):
        resets = _resets(type(module))
        if resets is not None and _has_tensors(module):
            resets(module)
    return root


def _twin(
    module: nn.Module, stock_class: StockClass, twins: dict[int, nn.Module], tensors: dict[int, Tensor]
) -> nn.Module:
    if id(module) in twins:
        return twins[id(module)]
    kind = stock_class(module)
    twin = twins[id(module)] = kind.__new__(kind)
    parameters = {
        name: None if held is None else nn.Parameter(_empty(held, tensors), requires_grad=held.requires_grad)
        for name, held in own_parameters(module).items()
    }
    buffers = {name: None if held is None else _empty(held, tensors) for name, held in own_buffers(module).items()}
    own = {name: held for name, held in vars(module).items() if name != WRITES}
    vars(twin).update(own | {"_parameters": parameters, "_buffers": buffers})
    vars(twin)["_modules"] = {
        name: None if child is None else _twin(child, stock_class, twins, tensors)
        for name, child in own_modules(module).items()
    }
    return twin


def _empty(held: Tensor, tensors: dict[int, Tensor]) -> Tensor:
    if id(held) not in tensors:
        tensors[id(held)] = torch.empty(tuple(held.shape), dtype=held.dtype)
    return tensors[id(held)]


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in own_modules(module).values():
        if child is not None:
            yield from _children_first(child, seen)
    yield module


__all__ = ["reset_twin", "unknown_modules"]

"""Optimizer steps on a rank's parts, behind torch's own optimizers.

in:  an optimizer with DTensors among its parameters, about to step
out: the same step, taken through a stand-in whose groups and state have local tensors in the DTensors' places

DTensor's dispatch takes several times as long as a small operation. torch calls a hook before each step, which may
replace the arguments, the optimizer among them; so the step itself, its options and its closure are torch's. Only
optimizers that compute each element by itself step so: their parts of the result are those of DTensor's dispatch, bit
for bit. The stand-in shares all attributes with the optimizer, and passes on what is added to the state; nothing needs
to be put back if a step raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tpplan.compat.dtensors import OwnPlacement, lie_alike, like_distributed, local_of
from tpplan.compat.tensors import gradient_of
from tpplan.runtime.parameters.sharded_tensors import REPLACED, ShardedTensor, refusal, shown

BY_ELEMENT: tuple[type[Optimizer], ...] = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""torch's optimizers that compute each element by itself; classes derived from them may do otherwise."""

_COUNTS = frozenset(("step", "eta", "mu", "mu_product"))  # numbers in their states, of a parameter as a whole

State = dict[str, Any]


def step_on_parts() -> Callable[[], None]:
    """From now on let optimizers step on parts; returns what ends that."""
    return register_optimizer_step_pre_hook(_replace_optimizer).remove


def _replace_optimizer(
    optimizer: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.compiler.is_compiling():
        _refuse_replaced(optimizer)
    if torch.compiler.is_compiling() or type(optimizer) not in BY_ELEMENT or not args or args[0] is not optimizer:
        return None
    groups = optimizer.param_groups
    if optimizer.defaults["differentiable"] or any(group["differentiable"] for group in groups):
        return None
    if not any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
        return None
    stand_in: Any = object.__new__(_stand_in_class(type(optimizer)))
    stand_in.__dict__ = optimizer.__dict__
    stand_in.parts = _Parts(optimizer.__dict__["param_groups"], optimizer.__dict__["state"])
    return (stand_in, *args[1:]), keywords


def _refuse_replaced(optimizer: Optimizer) -> None:
    for parameter in (held for group in optimizer.param_groups for held in group["params"]):
        if REPLACED in vars(parameter):
            raise refusal(
                f"an optimizer has {shown(parameter)} as it was before `fully_shard`, which nobody reads any more",
                "make optimizers after `fully_shard`",
            )


@functools.cache
def _stand_in_class(kind: type[Optimizer]) -> type[Optimizer]:
    members = {
        "__slots__": ("parts",),
        "__module__": kind.__module__,
        "param_groups": property(lambda self: self.parts.groups()),
        "state": property(lambda self: self.parts.state),
    }
    return type(kind.__name__, (kind,), members)


class _Parts:
    """An optimizer's groups and state, with local tensors in place of DTensors.

    Attributes:
        state: of the groups that were asked for last.
    """

    def __init__(self, groups: list[dict[str, Any]], state: dict[Tensor, State]) -> None:
        """Stand in for these."""
        self._groups = groups
        self._whole = state
        self.state: Mapping[Tensor, State] = state

    def groups(self) -> list[dict[str, Any]]:
        """The groups as they are now, since other hooks and the closure may have changed options and gradients.

        Those of the optimizer itself, if a gradient or a state doesn't lie as its parameter.
        """
        owners: dict[Tensor, DTensor] = {}
        groups: list[dict[str, Any]] = []
        for group in self._groups:
            local: list[Tensor] = []
            for parameter in group["params"]:
                gradient = gradient_of(parameter) if isinstance(parameter, DTensor) else None
                if gradient is not None:
                    part = _part(parameter, gradient, self._whole.get(parameter))
                    if part is None:
                        self.state = self._whole
                        return self._groups
                    owners[part] = parameter
                    local.append(part)
                else:
                    local.append(parameter)
            groups.append({**group, "params": local})
        torch.autograd.graph.increment_version([owner for owner in owners.values() if not owner.is_inference()])
        self.state = _States(self._whole, owners)
        return groups


def _part(parameter: DTensor, gradient: Tensor, state: State | None) -> Tensor | None:
    """A parameter's local tensor with its local gradient; None if they or the state don't lie alike."""
    if not isinstance(gradient, DTensor) or not lie_alike(gradient, parameter):
        return None
    if not isinstance(parameter, ShardedTensor) and _is_partial(parameter.placements):
        return None
    for name, value in () if state is None else state.items():
        if name in _COUNTS or not isinstance(value, Tensor):
            continue
        if type(value) is DTensor:
            value = ShardedTensor.adopted(value)
        if not isinstance(value, DTensor) or not lie_alike(value, parameter):
            return None
    part = local_of(parameter).detach()
    part.grad = local_of(gradient)
    return part


@functools.lru_cache(maxsize=256)
def _is_partial(placements: tuple[Any, ...]) -> bool:
    return any(placement.is_partial() and not isinstance(placement, OwnPlacement) for placement in placements)


class _States(dict[Tensor, State]):
    """The state by local tensor."""

    def __init__(self, whole: dict[Tensor, State], owners: Mapping[Tensor, DTensor]) -> None:
        """Take what `whole` has for the owners of the local tensors."""
        super().__init__()
        self._whole = whole
        self._owners = owners

    def __missing__(self, tensor: Tensor) -> State:
        owner = self._owners.get(tensor)
        self[tensor] = held = self._whole[tensor] if owner is None else _State(self._whole[owner], owner)
        return held


class _State(State):
    """The state of one parameter on local tensors; what is put into it is put into the DTensor's as well."""

    def __init__(self, whole: State, owner: DTensor) -> None:
        """Take the local tensors of `whole`, the state of `owner`."""
        super().__init__({name: local_of(held) if isinstance(held, Tensor) else held for name, held in whole.items()})
        self._whole = whole
        self._owner = owner

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or self[name] is not value:
            distributed = isinstance(value, Tensor) and name not in _COUNTS
            self._whole[name] = like_distributed(value, self._owner) if distributed else value
        super().__setitem__(name, value)


__all__ = ["BY_ELEMENT", "step_on_parts"]

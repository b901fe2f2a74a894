"""Choosing tokens from a vocabulary that is split over the ranks, without gathering the logits.

    logits = model(ids).logits                            with `lm_head: {style: colwise, output: shard}`
    token = tpplan.generation.argmax(logits[:, -1], model=model)

in:  this rank's logits, and whose they are, as `tpplan.loss` is told
out: what torch makes of the logits of the unsharded model, alike on all ranks

`model.generate` needs none of this: with such a head it chooses so by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.loss import part_of
from tpplan.plan import ArgumentError
from tpplan.plan.taken import FLAG, SIZE, TEXT, optional
from tpplan.runtime.classes import class_choices
from tpplan.taken_models import MODEL, RANKS_OF, TENSOR, takes_in_graphs


@takes_in_graphs(logits=TENSOR, keepdim=FLAG, model=optional(MODEL), mesh=RANKS_OF, axis=TEXT, classes=optional(SIZE))
def argmax(
    logits: Tensor,
    *,
    keepdim: bool = False,
    model: nn.Module | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    axis: str = "tp",
    classes: int | None = None,
) -> Tensor:
    """The class of each row's largest logit, of equal ones the lowest; for one all-gather of two numbers a row.

    Args:
        logits: (…, classes): this rank's, as a model returns them whose head has `output: shard`; or a DTensor that is
            split along its last dim; or whole ones, alike on all ranks.
        keepdim: whether to keep the class dim, with one entry.
        model: the sharded model that made the logits.
        mesh: instead of it, the mesh or the group of the ranks; for this, `classes` is needed.
        axis: the axis of a mesh of several.
        classes: how many there are on all ranks.

    Raises:
        LossError: TP165, if nothing tells which part of the classes the logits are.

    Example:
        >>> logits = torch.zeros(4, 16)  # this rank's, of 32 classes on two
        >>> tpplan.generation.argmax(logits, mesh=torch.distributed.group.WORLD, classes=32)
        tensor([0, 0, 0, 0])
    """
    made = class_choices.argmax(*part_of(logits, model, mesh, axis, classes))
    return made[..., None] if keepdim else made


@takes_in_graphs(logits=TENSOR, k=SIZE, model=optional(MODEL), mesh=RANKS_OF, axis=TEXT, classes=optional(SIZE))
def top_k(
    logits: Tensor,
    k: int,
    *,
    model: nn.Module | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    axis: str = "tp",
    classes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, from the largest on, and their classes; for one all-gather of 2k numbers a row.

    Args:
        logits: see `argmax`.
        k: how many.
        model: see `argmax`.
        mesh: see `argmax`.
        axis: see `argmax`.
        classes: see `argmax`.

    Returns:
        (…, k) values and (…, k) classes; of equal logits those of the lowest classes come first.

    Raises:
        LossError: TP165; see `argmax`.
        ArgumentError: the logits want a gradient, which none of the values would hand back.

    Example:
        >>> logits = torch.zeros(4, 16)  # this rank's, of 32 classes on two
        >>> values, classes = tpplan.generation.top_k(logits, 2, mesh=torch.distributed.group.WORLD, classes=32)
        >>> classes[0]
        tensor([0, 1])
    """
    local, part = part_of(logits, model, mesh, axis, classes)
    if torch.is_grad_enabled() and local.requires_grad:
        raise ArgumentError(
            "logits want a gradient, and none flows back from values that are chosen over the ranks: "
            "call top_k under `torch.no_grad()`, or pass `logits.detach()`"
        )
    return class_choices.top_k(local, k, part)


__all__ = ["argmax", "top_k"]

"""Losses for training loops of their own, over a vocabulary that is split over the ranks.

    logits = model(ids).logits                                  with `lm_head: {style: colwise, output: shard}`
    loss = tpplan.loss.cross_entropy(logits[:, :-1], ids[:, 1:], model=model)

in:  this rank's logits, labels that are alike on all ranks, and whose logits they are
out: the loss of the unsharded model, alike on all ranks; each gets the gradient of its part

A plain tensor doesn't tell which part of what it is. So the model that made it is passed, or the mesh and the number of
classes; logits that have neither the size of this rank's part nor that of the whole are refused (TP165).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from tpplan.plan import PlanError
from tpplan.plan.taken import NUMBER, SIZE, TEXT, WHOLE, optional
from tpplan.runtime.classes import class_losses as over_classes
from tpplan.runtime.classes.class_losses import ClassPart, Loss
from tpplan.runtime.modules.module_runtime import RUNTIME, ModuleRuntime
from tpplan.runtime.modules.sharded_modules import ShardedRoot
from tpplan.runtime.parameters.packed_tensors import PackedShard
from tpplan.runtime.ranks.communicator import Communicator, ProcessGroupCommunicator
from tpplan.taken_models import MODEL, RANKS_OF, TENSOR, takes_in_graphs

_REDUCTIONS = ("mean", "sum", "none")


class LossError(PlanError):
    """What was passed doesn't tell which part of the classes this rank has, or isn't what a loss takes."""


@takes_in_graphs(
    logits=TENSOR, chunk=optional(SIZE), model=optional(MODEL), mesh=RANKS_OF, axis=TEXT, classes=optional(SIZE),
    target=TENSOR, weight=optional(TENSOR), ignore_index=WHOLE, reduction=TEXT, label_smoothing=NUMBER, z_loss=NUMBER,
)  # fmt: skip
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    model: nn.Module | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    axis: str = "tp",
    classes: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Cross entropy of logits whose classes, the last dim, are split over the ranks.

    For one all-gather of three numbers a row (four with label smoothing), and nothing in the backward. It is computed
    in float32, or float64 for such logits, some rows at a time.

    Args:
        logits: (…, classes): this rank's, as a model returns them whose head has `output: shard`; or a DTensor that is
            split along its last dim; or whole ones, alike on all ranks.
        target: (…), class numbers, alike on all ranks.
        weight: of each class, all of them.
        ignore_index: a target whose row counts for nothing.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: the share of the target that is spread over all classes.
        z_loss: a factor of the squared logarithm of each row's sum of exponentials, which is added to its loss.
        model: the sharded model that made the logits.
        mesh: instead of it, the mesh or the group of the ranks; for this, `classes` is needed.
        axis: the axis of a mesh of several.
        classes: how many there are on all ranks.
        chunk: how many rows are worked on at once; by default as many as have four million logits on a rank.

    Returns:
        A scalar, or (…) without a reduction; float32 or float64, alike on all ranks. Not a number if no row counts.

    Raises:
        LossError: TP165; see the module.

    Example:
        >>> plan = {"version": 1, "modules": {"up": "none", "down": {"style": "colwise", "output": "shard"}}}
        >>> model = tpplan.parallelize(model, plan, inputs=x)
        >>> logits = model(x)  # this rank's 4 of 8 classes
        >>> tpplan.loss.cross_entropy(logits, torch.tensor([0, 1, 2, 3]), model=model).shape
        torch.Size([])
    """
    known = _known(model, mesh, axis, classes, chunk)
    loss = _loss(reduction, ignore_index, label_smoothing, z_loss, chunk)
    local, placed = _of_dtensor(logits, logits.dim() - 1, "logits")
    target, weight = _plain(target), None if weight is None else _plain(weight)
    _check_target(local, target)
    part = _part(local.shape[-1], [*placed, *known], chunk, "logits")
    _check_weight(weight, part)
    return over_classes.cross_entropy(local, target, weight, loss, part, local.dim() - 1)


@takes_in_graphs(
    hidden=TENSOR, head=TENSOR, bias=optional(TENSOR), chunk=optional(SIZE), mesh=RANKS_OF, axis=TEXT,
    classes=optional(SIZE),
    target=TENSOR, weight=optional(TENSOR), ignore_index=WHOLE, reduction=TEXT, label_smoothing=NUMBER, z_loss=NUMBER,
)  # fmt: skip
def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    axis: str = "tp",
    classes: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Cross entropy of the logits `hidden @ head.T + bias`, of which no rank ever has more than a chunk.

    For the all-gather of `cross_entropy`, and an all-reduce of the gradient of the hidden states in the backward, where
    each chunk of logits is made once more.

    Args:
        hidden: (…, features), whole and alike on all ranks, as `model.model(ids)` returns it.
        head: (classes, features): the parameter of a sharded model, such as `model.lm_head.weight`; or this rank's
            rows of it, with `mesh` and `classes`.
        target: see `cross_entropy`.
        weight: see `cross_entropy`.
        ignore_index: see `cross_entropy`.
        reduction: see `cross_entropy`.
        label_smoothing: see `cross_entropy`.
        bias: (classes): of the head, split as it is.
        z_loss: see `cross_entropy`.
        mesh: see `cross_entropy`.
        axis: see `cross_entropy`.
        classes: see `cross_entropy`.
        chunk: how many rows are worked on at once; by default as many as have four million logits on a rank.

    Returns:
        See `cross_entropy`.

    Raises:
        LossError: TP165; see the module.

    Example:
        >>> model = tpplan.parallelize(model, {"version": 1, "modules": {"up": "colwise"}}, inputs=x)
        >>> tpplan.loss.linear_cross_entropy(x, model.up.weight, torch.tensor([0, 1, 2, 3]), bias=model.up.bias).shape
        torch.Size([])
    """
    known = _known(None, mesh, axis, classes, chunk)
    loss = _loss(reduction, ignore_index, label_smoothing, z_loss, chunk)
    local, placed = _of_dtensor(head, 0, "head")
    own_bias = None if bias is None else _of_dtensor(bias, 0, "bias")[0]
    hidden, target, weight = _plain(hidden), _plain(target), None if weight is None else _plain(weight)
    _check_target(hidden, target)
    if local.dim() != 2 or local.shape[1] != hidden.shape[-1] or (own_bias is not None and len(own_bias) != len(local)):
        raise _refusal(
            f"a head of shape {list(local.shape)} doesn't fit hidden states of shape {list(hidden.shape)}",
            "pass the weight of the linear layer, and its bias",
        )
    part = _part(local.shape[0], [*placed, *known], chunk, "rows of the head")
    _check_weight(weight, part)
    return over_classes.linear_cross_entropy(hidden, (local, own_bias), target, weight, loss, part)


@takes_in_graphs(logits=TENSOR, model=optional(MODEL), mesh=RANKS_OF, axis=TEXT, classes=optional(SIZE))
def part_of(
    logits: Tensor,
    model: nn.Module | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    axis: str = "tp",
    classes: int | None = None,
) -> tuple[Tensor, ClassPart]:
    """This rank's part of logits, and which classes these are; the arguments are those of `cross_entropy`.

    Raises:
        LossError: TP165; see the module.

    Example:
        >>> logits = torch.randn(4, 16)  # this rank's, of 32 classes on two
        >>> local, part = tpplan.loss.part_of(logits, mesh=torch.distributed.group.WORLD, classes=32)
        >>> local.shape
        torch.Size([4, 16])
    """
    known = _known(model, mesh, axis, classes, None)
    local, placed = _of_dtensor(logits, logits.dim() - 1, "logits")
    return local, _part(local.shape[-1], [*placed, *known], None, "logits")


class _Alone:
    """A rank that has all classes."""

    size = 1
    rank = 0
    one_shot = 0

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor, split_dim: int, concatenate_dim: int) -> Tensor:
        return tensor

    def all_to_all_sizes(self, sizes: Tensor, most: int) -> tuple[Tensor, list[int], list[int]]:
        return sizes, [most], [most]

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return rows


_Known = tuple[Communicator, int]
"""The ranks, and how many classes they share."""


def _known(
    model: nn.Module | None,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    axis: str,
    classes: int | None,
    chunk: int | None,
) -> list[_Known]:
    """What the caller says of the classes: of a model, all that its results could be."""
    if mesh is not None:
        if classes is None:
            raise _refusal("a mesh doesn't tell how many classes there are", "pass `classes=` or `model=` as well")
        group = mesh if isinstance(mesh, dist.ProcessGroup) else _group(mesh, axis)
        return [(ProcessGroupCommunicator(group), classes)]
    if model is None:
        return []
    root = next((m for m in model.modules() if isinstance(m, ShardedRoot)), None)
    if root is None:
        return []
    runtime: ModuleRuntime = root.__dict__[RUNTIME]
    return [(runtime.axis, count) for count in runtime.split_classes if classes in (None, count)]


def _group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    if axis not in (mesh.mesh_dim_names or ()):
        raise _refusal(f"the mesh has no axis `{axis}`", "name it with `axis=`")
    return mesh.get_group(axis)


def _of_dtensor(tensor: Tensor, dim: int, what: str) -> tuple[Tensor, list[_Known]]:
    """This rank's part of a tensor, and what a DTensor says of its classes, `dim`."""
    if not isinstance(tensor, DTensor):
        return tensor, []
    shape, found = tensor.shape, list[_Known]()
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate) or tensor.device_mesh.size(number) == 1:
            continue
        packed = isinstance(placement, PackedShard) and placement.layout.dim == dim and placement.chunks == (None,)
        plain = packed and placement.layout.stretches(shape[dim])[0].size == shape[dim]  # pyright: ignore
        if not (plain or (type(placement) is Shard and placement.dim == dim)) or found:
            raise _refusal(
                f"the {what} are placed as {list(tensor.placements)}, and not split by classes on one axis",
                "pass a tensor whose classes alone are split, or this rank's part of it",
            )
        found.append((ProcessGroupCommunicator(tensor.device_mesh.get_group(number)), shape[dim]))
    return tensor.to_local(), found or [(_Alone(), shape[dim])]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(count: int, known: list[_Known], chunk: int | None, what: str) -> ClassPart:
    """Which classes a tensor has, by how many it has."""
    parts = [ClassPart(axis, classes, chunk) for axis, classes in known]
    for part in parts:
        if part.count == count:
            return part
    if any(part.classes == count for part in parts):
        return ClassPart(_Alone(), count, chunk)
    if not parts:
        raise _refusal(
            f"nothing tells which part of the classes these {count} {what} are",
            "pass the sharded model that made them as `model=`, or `mesh=` and `classes=`; for logits of all classes "
            "there is torch.nn.functional.cross_entropy",
        )
    shown = " or ".join(f"{part.count} of {part.classes}" for part in parts)
    raise _refusal(
        f"there are {count} {what}, where this rank has {shown}",
        "pass them as the model returns them: neither gathered in part, nor cut, nor of another model",
    )


def _loss(reduction: str, ignore_index: int, label_smoothing: float, z_loss: float, chunk: int | None) -> Loss:
    if reduction not in _REDUCTIONS:
        raise _refusal(f"there is no reduction {reduction!r}", f"choose one of {', '.join(_REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise _refusal(f"label_smoothing is {label_smoothing}", "choose a share from 0 to 1")
    if chunk is not None and chunk < 1:
        raise _refusal(f"chunk is {chunk}", "choose a number of rows, at least 1, or None")
    return Loss(reduction, ignore_index, label_smoothing, z_loss)


def _check_target(rows: Tensor, target: Any) -> None:
    if not rows.is_floating_point() or not rows.dim() or target.is_floating_point() or target.shape != rows.shape[:-1]:
        raise _refusal(
            f"{rows.dtype} {list(rows.shape)} doesn't fit targets {target.dtype} {list(target.shape)}",
            "the classes are the last dim; pass an integer for each row before them",
        )


def _check_weight(weight: Tensor | None, part: ClassPart) -> None:
    if weight is not None and tuple(weight.shape) != (part.classes,):
        raise _refusal(
            f"the weights have shape {list(weight.shape)}, and there are {part.classes} classes",
            "pass the weights of all classes on every rank",
        )


def _refusal(message: str, way_out: str) -> LossError:
    return LossError.of("TP165", message, help=way_out)


__all__ = ["LossError", "cross_entropy", "linear_cross_entropy", "part_of"]

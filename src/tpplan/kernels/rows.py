"""Tensors as kernels see them: rows of adjacent elements, at any distance from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def as_rows(tensor: Tensor, dims: int = 1) -> Tensor:
    """A view of shape (rows, columns), the last `dims` dims flattened to columns that lie side by side.

    Copies only where no such view exists: the last dim isn't dense, or the leading dims don't merge. A tensor that was
    expanded along its rows, or is part of wider rows, is taken as it is.
    """
    rows, columns = row_shape(tensor.shape, dims)
    flat = tensor.reshape(rows, columns)
    return flat if columns <= 1 or flat.stride(1) == 1 else flat.contiguous()


def as_flat_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape as rows; as one single row where all are contiguous, which wastes no lanes on row ends."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor, min(1, tensor.dim())) for tensor in tensors]


def row_shape(shape: torch.Size, dims: int) -> tuple[int, int]:
    """The number of rows and of columns, if the last `dims` dims are the columns."""
    leading = len(shape) - dims
    return math.prod(shape[:leading]), math.prod(shape[leading:])

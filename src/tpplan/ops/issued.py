"""Issued: the operators that the compiler calls, puts into a record, or asks DTensor's rule for, itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpplan.compat.schemas import OpOverload

_aten = torch.ops.aten

ALIAS: OpOverload = _aten.alias.default
CLONE: OpOverload = _aten.clone.default
SLICE: OpOverload = _aten.slice.Tensor
MM: OpOverload = _aten.mm.default
# By which numbers are read, compared and found in tensors.
NUMBER: OpOverload = _aten._local_scalar_dense.default
EQUAL: OpOverload = _aten.equal.default
NONZERO: OpOverload = _aten.nonzero.default
COUNT_NONZERO: OpOverload = _aten.count_nonzero.default
UNIQUE: OpOverload = _aten._unique2.default
MASKED_SELECT: OpOverload = _aten.masked_select.default
INDEX: OpOverload = _aten.index.Tensor
TO_COPY: OpOverload = _aten._to_copy.default
# Look-ups of a frozen table, and of any, which compute the same.
FROZEN_BAG: OpOverload = _aten._embedding_bag_forward_only.default
BAG: OpOverload = _aten._embedding_bag.default
# By which a body that runs from its record takes a part of a whole value, and reshards one: models don't call these, so
# that a check knows them.
ALIAS_COPY: OpOverload = _aten.alias_copy.default
SLICE_COPY: OpOverload = _aten.slice_copy.Tensor
STRIDED_COPY: OpOverload = _aten.as_strided_copy.default
# A rank's part of a whole value may have gaps, over which no view reaches.
VIEWS_OF_PARTS: Mapping[object, OpOverload] = {_aten.view.default: _aten.reshape.default}
# Writing by rows is linear in both tensors, and the same in place; not all versions of DTensor have rules for that.
RULED_AS: Mapping[OpOverload, OpOverload] = {
    _aten.index_add_.default: _aten.index_add.default,
    _aten.index_copy.default: _aten.index_add.default,
    _aten.index_copy_.default: _aten.index_add.default,
    _aten.index_put_.default: _aten.index_put.default,
    _aten.scatter_add_.default: _aten.scatter_add.default,
}
INT_MM = _aten._int_mm.default
"""A product of int8 in int32, which torch has for two matrices alone, as `mm`; DTensor has no rule for it."""
# What functions over classes compute, by their names here.
OF_CLASSES: Mapping[str, OpOverload] = {
    "logsumexp": _aten.logsumexp.default,
    "log_softmax": _aten._log_softmax.default,
    "softmax": _aten._softmax.default,
    "sum": _aten.sum.dim_IntList,
    "mean": _aten.mean.dim,
    "amax": _aten.amax.default,
    "amin": _aten.amin.default,
    "argmax": _aten.argmax.default,
    "argmin": _aten.argmin.default,
    "max": _aten.max.dim,
    "min": _aten.min.dim,
    "gather": _aten.gather.default,
}

__all__ = [
    "ALIAS", "ALIAS_COPY", "BAG", "CLONE", "COUNT_NONZERO", "EQUAL", "FROZEN_BAG", "INDEX", "INT_MM", "MASKED_SELECT",
    "MM", "NONZERO", "NUMBER", "OF_CLASSES", "RULED_AS", "SLICE", "SLICE_COPY", "STRIDED_COPY", "TO_COPY", "UNIQUE",
    "VIEWS_OF_PARTS",
]  # fmt: skip

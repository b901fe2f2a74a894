"""The words of the plan language: styles, pins, exchanges, options and kernel kinds."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

PLAN_VERSION: Final = 1
DEFAULT_AXIS: Final = "tp"
AUTO: Final = "auto"  # in place of a plan: have one found


class Style(StrEnum):
    """How one module's parameters are laid out over the axis."""

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    SEQUENCE = "sequence"
    VOCAB = "vocab"
    EXPERTS = "experts"
    REPLICATE = "replicate"
    NONE = "none"


class Pin(StrEnum):
    """A placement demanded of a module's input or output, instead of the inferred one."""

    REPLICATE = "replicate"
    SHARD = "shard"
    SEQUENCE = "sequence"


class Exchange(StrEnum):
    """How ranks that hold whole experts exchange the tokens, where these are split over them."""

    ALL_TO_ALL = "all-to-all"
    SUMS = "sums"


class KernelKind(StrEnum):
    """An operation for which tpplan has a Triton kernel."""

    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"
    GELU = "gelu"
    BIAS_GELU = "bias_gelu"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    RESIDUAL_NORM = "residual_norm"
    CROSS_ENTROPY = "cross_entropy"


class KernelChoice(StrEnum):
    """Which implementation of a kernel kind to use."""

    AUTO = "auto"
    TRITON = "triton"
    TORCH = "torch"


class OverlapUnit(StrEnum):
    """A collective, and the computation that it is hidden behind."""

    GATHER_LINEAR = "gather_linear"
    LINEAR_REDUCE = "linear_reduce"
    WEIGHT_GRADIENT = "weight_gradient"
    HALF_BATCHES = "half_batches"


class OverlapWord(StrEnum):
    """What is overlapped, in one word."""

    AUTO = "auto"
    NONE = "none"


Overlaps = OverlapWord | tuple[OverlapUnit, ...]

OPTIONS_BY_STYLE: Final[dict[Style, frozenset[str]]] = {
    Style.COLWISE: frozenset({"input", "output", "packed", "local", "overlap"}),
    Style.ROWWISE: frozenset({"input", "output", "packed", "local", "overlap"}),
    Style.SEQUENCE: frozenset({"input", "output", "local"}),
    Style.VOCAB: frozenset({"input", "output", "local"}),
    Style.EXPERTS: frozenset({"exchange"}),
    Style.REPLICATE: frozenset({"input", "output", "local"}),
    Style.NONE: frozenset(),
}

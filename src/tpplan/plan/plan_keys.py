"""The keys of a plan file, their types and their meaning: the source of the JSON Schema and the reader."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal

from tpplan.plan.vocabulary import Exchange, KernelChoice, KernelKind, OverlapUnit, OverlapWord, Pin, Style

_PYDANTIC_CONFIG: Final[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(kw_only=True, eq=False, repr=False)
class RuleOptions:
    """A rule in its long form."""

    __pydantic_config__: ClassVar = _PYDANTIC_CONFIG

    style: Style
    """How the module's parameters are laid out over the axis."""
    input: Pin | None = None
    """The placement demanded of the input, instead of the inferred one."""
    output: Pin | None = None
    """The placement demanded of the output, instead of the inferred one."""
    packed: list[str] | dict[str, int] | None = None
    """The matrices in a packed projection, in order; with their sizes where they differ."""
    local: list[str] | None = None
    """Integer attributes that count something global, such as `num_heads`, and have to become local."""
    exchange: Exchange | None = None
    """How tokens that are split along the sequence reach experts on other ranks, instead of the cheaper way."""
    overlap: OverlapWord | list[OverlapUnit] | None = None
    """Which of the layer's collectives run beside its products, instead of what the plan says for all."""


@dataclass(kw_only=True, eq=False, repr=False)
class PlanFile:
    """A tensor parallelism plan."""

    __pydantic_config__: ClassVar = _PYDANTIC_CONFIG

    version: Literal[1]
    """The version of the plan language."""
    name: str | None = None
    """The plan's name; the file's stem by default."""
    extends: str | None = None
    """A plan to start from: a path relative to this file, or the name of a plan that ships with tpplan."""
    axis: str | None = None
    """The mesh axis over which the modules are sharded; `tp` by default."""
    modules: dict[str, Style | RuleOptions] | None = None
    """Rules by pattern over dotted module names; the most specific one wins."""
    kernels: dict[str, KernelChoice | dict[KernelKind, KernelChoice]] | None = None
    """Kernel choices by kind, or by a module pattern and then by kind."""
    operators: dict[str, str] | None = None
    """How operators of torch.library work on parts of their arguments: rules by name, `my::attn`."""
    one_shot_all_reduce: int | None = None
    """The largest all-reduces, in bytes, that ranks do in one step, each reading what all others have."""
    overlap: OverlapWord | list[OverlapUnit] | None = None
    """Which collectives run beside matrix products; `none` by default."""
    chunks: int | None = None
    """Of how many products each layer is that runs beside a collective, instead of what the cost model chooses."""
    recompute_gather: bool | None = None
    """Whether the backward gathers the inputs of split layers again, instead of the forward keeping them."""
    fused_overlap: bool | None = None
    """Whether torch's fused operators overlap collectives with products, on GPUs that read each other's memory."""


PLAN_KEYS: Final = tuple(entry.name for entry in fields(PlanFile))
RULE_KEYS: Final = tuple(entry.name for entry in fields(RuleOptions))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a plan file."""
    from tpplan.plan.schema_export import export

    return export(PlanFile)

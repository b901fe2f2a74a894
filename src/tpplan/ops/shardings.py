"""Shardings: what somebody told torch of an operator, by `register_sharding`, as rules by names.

in:  an operator, and the tensors of a call of it
out: a rule for each acceptable sharding that splits something; one name in it is split, all others are whole

    [Shard(1)], [Shard(1), Shard(1)]        ->   b! h, b! h -> b! h    where `h` reads "dim 1 of q, k"
    [Partial()], [Shard(1), Shard(0)]       ->   n! i+, i+ m! -> n! m!
    [Partial()], [Partial(), Replicate()]   ->   n! m!, m! -> n! m!, linear in x

Dims of other sizes that are split together are runs of the shortest one's entries, as of queries that share a key.
Placements that no rule tells, such as a whole result of split operands or the mean over the ranks, aren't used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed.tensor.placement_types import Placement, Shard

from tpplan.compat.propagator import acceptable_shardings, given_sharding
from tpplan.compat.schemas import OpOverload
from tpplan.ops.declared import OperatorRuleError, overloads, refused, rule_of
from tpplan.plan.operator_rule import Dim, OperatorRule, Term

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """An argument of the schema.

    Attributes:
        shapes: of the tensor, or of a list's; None for one that wasn't given.
    """

    name: str
    shapes: tuple[Shape | None, ...]
    is_list: bool


@dataclass(frozen=True, slots=True)
class ShardingCall:
    """A call of an operator, as a function for `register_sharding` is asked of it.

    Attributes:
        arguments, keywords: with an `OperatorMeta` for each tensor.
        tensors: the tensor arguments of the schema.
        results: the shapes of the results; None for one that is no tensor, or that nobody reads.
    """

    operator: OpOverload
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    tensors: tuple[TensorArgument, ...]
    results: tuple[Shape | None, ...]

    @property
    def given(self) -> list[tuple[str, Shape]]:
        """The tensors that it was given."""
        return [(held.name, shape) for held in self.tensors for shape in held.shapes if shape is not None]


def is_placed(operator: OpOverload) -> bool:
    """Whether somebody told torch how to split an operator; tpplan's own kernels are audited where they are."""
    return given_sharding(operator) is not None and operator.namespace != "tpplan"


def has_rule(name: str) -> bool:
    """Whether an operator, by its full name `my.attn.default`, has a rule of the user's, or torch was told one."""
    return rule_of(name) is not None or any(map(is_placed, overloads(name.replace(".", "::", 1))))


def rules_of_shardings(call: ShardingCall, size: int) -> tuple[OperatorRule, ...]:
    """A rule for each way in which `size` ranks may share out a call.

    Raises:
        OperatorRuleError: TP022 for a function that fails, or that doesn't tell of each tensor.
    """
    sharding = given_sharding(call.operator)
    assert sharding is not None
    try:
        return _remembered(sharding, call, size)
    except TypeError:  # an argument that can't be hashed
        return _asked(sharding, call, size)


def _asked(sharding: Callable[..., Any], call: ShardingCall, size: int) -> tuple[OperatorRule, ...]:
    try:
        ways = acceptable_shardings(sharding, call.arguments, dict(call.keywords), size)
    except Exception as error:  # whatever a user's function raises
        raise _unread(call, f"raises {type(error).__name__}: {error}") from error
    return tuple(dict.fromkeys(rule for way in ways if (rule := _rule(call, *way)) is not None))


_remembered = functools.lru_cache(maxsize=1 << 10)(_asked)


def _unread(call: ShardingCall, why: str) -> OperatorRuleError:
    return refused(
        f"the function that `register_sharding` was given for `{call.operator.name()}` {why}",
        "let it return, for each way to split a call, the placements of the results and of the arguments",
    )


def _rule(
    call: ShardingCall, results: Sequence[Placement | None], operands: Sequence[Placement | None]
) -> OperatorRule | None:
    """The rule of one acceptable sharding; None where no rule tells it, or nothing is split."""
    given = [held for held in operands if held is not None]
    if len(given) != len(call.given):
        raise _unread(call, f"tells {len(given)} placements of {len(call.given)} tensors")
    if len(results) not in (1, len(call.results)):
        raise _unread(call, f"tells {len(results)} placements of {len(call.results)} results")
    made: list[Placement | None] = [*results]
    made += made[:1] * (len(call.results) - len(made))
    before = [(shape, held) for (_, shape), held in zip(call.given, given, strict=True)]
    after = [(shape, held) for shape, held in zip(call.results, made, strict=True) if shape is not None]
    split = {shape[dim] for shape, held in before if (dim := _split_dim(held, shape)) is not None}
    linear = [name for (name, _), held in zip(call.given, given, strict=True) if held.is_partial("sum")]
    told = all(_split_dim(held, shape) is not None or held.is_replicate() or _is_sum(held) for shape, held in before)
    told &= all(_is_sum(held) or (bool(split) and _split_dim(held, shape) is not None) for shape, held in after)
    if not told or len(linear) + bool(split) != 1:
        return None
    sizes = split | {shape[dim] for shape, held in after if (dim := _split_dim(held, shape)) is not None}
    if any(size % max(min(sizes), 1) for size in sizes):
        return None
    name = _in_words(call, given)
    terms = iter([_term(shape, held, name, min(sizes, default=0)) for shape, held in before])
    lists = [[Term(None) if shape is None else next(terms) for shape in held.shapes] for held in call.tensors]
    results_terms = tuple(
        Term(None) if shape is None else _term(shape, held, name, min(sizes, default=0))
        for shape, held in zip(call.results, made, strict=True)
    )
    arguments = tuple(
        Term((), tuple(items)) if held.is_list else items[0] for held, items in zip(call.tensors, lists, strict=True)
    )
    names = frozenset[str]().union(*(term.names for term in (*arguments, *results_terms)))
    kept = any(name in term.names for term in results_terms)
    return OperatorRule(
        f"{', '.join(map(_short, given))} -> {', '.join(map(_short, results))}", arguments, results_terms,
        whole=names - {name}, summed=frozenset() if kept or linear else frozenset((name,)), linear=(*linear,),
        placed=True,
    )  # fmt: skip


def _is_sum(held: Placement | None) -> bool:
    return held is not None and held.is_partial("sum")


def _split_dim(held: Placement | None, shape: Shape) -> int | None:
    if type(held) is not Shard or not -len(shape) <= held.dim < len(shape):
        return None
    return cast("int", held.dim) % len(shape)  # pyright: ignore[reportUnknownMemberType]


def _term(shape: Shape, held: Placement | None, name: str, count: int) -> Term:
    """The dims of a tensor: whole ones by their size, so that a trial may have fewer entries of equal ones."""
    split = _split_dim(held, shape)
    dims = [Dim((f"={size}@{place}",)) for place, size in enumerate(shape)]
    if split is not None:
        dims[split] = Dim((name,) if shape[split] == count else (name, f"={shape[split]}/{count}"))
    return Term((*dims,))


def _in_words(call: ShardingCall, given: Sequence[Placement]) -> str:
    """What is split: `dim 1 of q, k`."""
    dims: dict[int, list[str]] = {}
    for (name, shape), held in zip(call.given, given, strict=True):
        dim = _split_dim(held, shape)
        if dim is not None:
            dims.setdefault(dim, []).append(name)
    return " and ".join(f"dim {dim} of {', '.join(dict.fromkeys(names))}" for dim, names in dims.items())


def _short(held: Placement | None) -> str:
    if held is None:
        return "None"
    return f"Shard({held.dim})" if isinstance(held, Shard) else "Replicate()" if held.is_replicate() else "Partial()"


__all__ = ["ShardingCall", "TensorArgument", "has_rule", "is_placed", "rules_of_shardings"]

"""Functions of Python with a rule: to a capture each is one operator, whose gradients follow from the rule.

    flash = tpplan.operator("b s! h d!, b t! h d!, b t! h d! -> b s! h d!")(flash_attn_func)

Outside of captures the function runs as it is. In one, on tensors without numbers, an operator stands for it: its
results have the shapes that the rule tells, and its backward is another operator, by which a gradient has its
argument's dims and is summed over the parts of names that these lack.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from tpplan.compat.modes import has_function_mode
from tpplan.compat.tensors import READ_VERSION
from tpplan.compat.trees import flattened_tree, rebuilt_tree
from tpplan.ops.declared import declare, read_or_refuse, refused, register_by_name
from tpplan.ops.dims import dims_of, leading_dims, shape_of, sizes_of
from tpplan.ops.trial import ClaimError
from tpplan.plan.operator_rule import OperatorRule, Term
from tpplan.plan.taken import FLAG, TEXTS, ArgumentKind, optional, takes
from tpplan.taken_models import DTYPE

SPACE = "tpplan_declared"
"""The namespace of the operators that stand for functions."""
_library = torch.library.Library(SPACE, "DEF")
_numbers = itertools.count()
# What has become of functions: not in these themselves, which are part of a model's state.
_kept: dict[object, Any] = {}
_operators: dict[tuple[int, int], Any] = {}
_calls: dict[tuple[int, str], tuple[Any, list[Any]]] = {}
_NAMES = ArgumentKind(
    lambda held: isinstance(held, (list, tuple)) and all(isinstance(x, str) for x in held),  # pyright: ignore
    "a list of arguments' names",
)
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


class DeclaredFunction:
    """A function with a rule; what `operator` returns."""

    def __init__(self, function: Callable[..., Any], rule: OperatorRule, dtype: torch.dtype | None) -> None:
        """See `operator`."""
        functools.update_wrapper(self, function)
        self.function = function
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self.rule = rule
        self._dtype = dtype
        _kept[id(self)] = self  # operators are for good

    def __get__(self, instance: Any, owner: type) -> DeclaredFunction:
        if instance is None or not isinstance(instance, torch.nn.Module):
            return self
        raise refused(
            f"the method `{self.__name__}` of a module has a rule, which says nothing of what the module holds",
            "declare a function that is given all its tensors, and call that in the method",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or record that it was called."""
        first = next(_tensors_in(args, kwargs), None)
        if has_function_mode():
            given = () if first is None else (first,)
            return handle_torch_function(self, given, *args, **kwargs)  # one step of a body, whatever it does
        if first is None or not first.is_meta:
            return self._called(args, kwargs)
        leaves, form = flattened_tree((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call = f"{form} {[_shown(leaf) for leaf in leaves]}"
        _calls.setdefault((id(self), call), (form, others))
        made = iter(self.defined(len(tensors))(tensors, call))
        results = tuple(None if term.dims is None else next(made) for term in self.rule.results)
        return results[0] if len(results) == 1 else results

    def defined(self, tensors: int) -> Any:
        """The operator that stands for the function on so many tensors."""
        key = id(self), tensors
        if key not in _operators:
            _operators[key] = self._define(self._terms(tensors))
        return _operators[key]

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        held = [tensor for tensor in _tensors_in(args, kwargs) if not tensor.is_inference()]
        before = [*map(READ_VERSION, held)]
        made = self.function(*args, **kwargs)
        if before != [*map(READ_VERSION, held)]:
            raise refused(
                f"`{self.__name__}` writes to an argument, which its rule doesn't tell",
                "let it return what it makes, and leave its arguments as they are",
            )
        return made

    def __deepcopy__(self, memo: Any) -> DeclaredFunction:
        return self  # as functions are, in copies of what holds them

    def _terms(self, tensors: int) -> list[Term]:
        """The terms of so many tensors: `_` may stand for an argument that is None, `[b h]` for any number."""
        terms = _unlisted(self.rule.operands, tensors)
        if len(terms) != tensors:
            terms = [term for term in terms if term.dims is not None]
        if len(terms) != tensors:
            raise refused(
                f"`{self.__name__}` is called with {tensors} tensors, and its rule has terms for "
                f"{len(_unlisted(self.rule.operands, tensors))}",
                "write a term for each tensor that it is called with, in order, and `_` for one that may be None",
            )
        return terms

    def _define(self, terms: list[Term]) -> Any:
        """One operator for the function on such tensors, and one for its backward."""
        kind = self.__name__.strip("_<>") or "function"
        name = f"{kind}_{next(_numbers)}"
        _library.define(f"{name}(Tensor[] tensors, str call) -> Tensor[]")
        _library.define(f"{name}_backward(Tensor?[] gradients, Tensor[] tensors, str call) -> Tensor[]")
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        _library.impl(f"{name}_backward", self._run_backward, "CompositeExplicitAutograd")
        space: Any = getattr(torch.ops, SPACE)
        backward: Any = getattr(space, f"{name}_backward")

        def derive(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, None]:
            made = backward(list(gradients), ctx.tensors, ctx.call)
            return [g if _is_differentiable(t) else None for g, t in zip(made, ctx.tensors, strict=True)], None

        def setup(ctx: Any, inputs: tuple[Any, str], output: Any) -> None:
            ctx.tensors, ctx.call = inputs

        torch.library.register_autograd(f"{SPACE}::{name}", derive, setup_context=setup, lib=_library)
        declare(f"{SPACE}::{name}", self._as_list(terms, self._results))
        declare(
            f"{SPACE}::{name}_backward",
            replace(
                self._as_list(terms, terms),
                operands=(Term((), self._results), Term((), tuple(terms))),
                derived=True,
                random=False,  # it differentiates what was drawn
            ),
        )
        return getattr(space, name)

    @property
    def _results(self) -> tuple[Term, ...]:
        """The terms of the results that are tensors."""
        return tuple(term for term in self.rule.results if term.dims is not None)

    def _as_list(self, operands: Sequence[Term], results: Sequence[Term]) -> OperatorRule:
        return replace(self.rule, operands=(Term((), tuple(operands)),), results=(Term((), tuple(results)),))

    def _filled(self, tensors: Sequence[Tensor], call: str) -> Any:
        form, leaves = _calls[id(self), call]
        given = iter(tensors)
        args, kwargs = rebuilt_tree([next(given) if held is _TENSOR else held for held in leaves], form)
        return self.function(*args, **kwargs)

    def _run(self, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
        if not tensors[0].is_meta:
            copies = [held.clone() for held in tensors]  # kernels write to what they are given, unseen by autograd
            watched = [held for held in copies if not held.is_inference()]
            before = [*map(READ_VERSION, watched)]
            made = self._filled(copies, call)
            if before != [*map(READ_VERSION, watched)]:
                raise ClaimError("it writes to an argument, and a capture takes that for what it was")
            results = [made] if made is None or isinstance(made, Tensor) else [*made]
            kinds = [Tensor if term.dims is not None else type(None) for term in self.rule.results]
            if len(results) != len(kinds) or not all(map(isinstance, results, kinds)):
                raise ClaimError(f"it returns {len(results)} results, or None, and its rule has {len(kinds)}")
            return [held for held in results if held is not None]
        try:
            pairs = zip(self._terms(len(tensors)), tensors, strict=True)
            named = [(dims_of(term, held.dim()), tuple(held.shape)) for term, held in pairs if term.dims is not None]
            counts = sizes_of(named)
            shapes = [shape_of(term, counts, leading_dims(counts)) for term in self._results]
        except (ValueError, KeyError) as error:
            told = f"no argument tells the size of {error}" if isinstance(error, KeyError) else str(error)
            raise refused(f"`{self.__name__}` is called with what its rule `{self.rule.text}` doesn't fit: {told}",
                          "write the dims of the tensors that it is called with, in order") from None  # fmt: skip
        dtype = self._dtype or tensors[0].dtype
        return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]

    def _run_backward(self, gradients: Sequence[Tensor | None], tensors: Sequence[Tensor], call: str) -> list[Tensor]:
        if tensors[0].is_meta:
            return [torch.empty_like(held) for held in tensors]
        inputs = [held.detach().requires_grad_(_is_differentiable(held)) for held in tensors]
        with torch.enable_grad():
            results = self._run(inputs, call)
        wanted = [held for held in inputs if held.requires_grad]
        pairs = [(m, g) for m, g in zip(results, gradients, strict=True) if g is not None and m.requires_grad]
        if not pairs:
            return [torch.zeros_like(held) for held in inputs]
        found: Iterator[Tensor | None] = iter(
            torch.autograd.grad([m for m, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        )
        made = [next(found) if held.requires_grad else None for held in inputs]
        return [torch.zeros_like(held) if own is None else own for own, held in zip(made, inputs, strict=True)]


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for held in (*args, *kwargs.values()):
        if isinstance(held, Tensor):
            yield held
        elif isinstance(held, (list, tuple, dict)):
            yield from (leaf for leaf in flattened_tree(held)[0] if isinstance(leaf, Tensor))


def _unlisted(terms: Sequence[Term], tensors: int) -> list[Term]:
    """The terms one by one, without brackets; the one list without a length has what is left of so many tensors."""
    others = sum(len(term.items) or 1 for term in terms if len(term.items) != 1)
    found: list[Term] = []
    for term in terms:
        found += term.items * (tensors - others) if len(term.items) == 1 else term.items or (term,)
    return found


_TENSOR = object()


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    if isinstance(leaf, (torch.SymInt, torch.SymFloat)):
        return str(leaf)
    return repr(leaf) if isinstance(leaf, _PLAIN) else f"{type(leaf).__name__} {id(leaf)}"  # `_calls` keeps it


@takes(random=FLAG, audit=FLAG, dtype=DTYPE)
def operator(
    rule: str,
    *,
    random: bool = False,
    audit: bool = True,
    dtype: torch.dtype | None = None,
) -> Callable[[Callable[..., Any]], DeclaredFunction]:
    """Declare how a function of Python works on parts of its tensors; the model then calls what comes back.

        flash = tpplan.operator("b s! h d!, b t! h d!, b t! h d! -> b s! h d!")(flash_attn_func)

    Args:
        rule: a term for each tensor that the function is given, in order, and behind `->` for each result.
        random, audit: see `register_operator`.
        dtype: of the results; that of the first tensor unless given.

    Raises:
        OperatorRuleError: TP022 with the place in the rule.

    Example:
        >>> @tpplan.operator("... n -> ... n")
        ... def squared(x):
        ...     return x * x
        >>> squared(x).shape
        torch.Size([4, 8])
    """
    made = replace(read_or_refuse(rule, "the rule"), random=random, audit=audit)
    _refuse_lists(made)

    def declared(function: Callable[..., Any]) -> DeclaredFunction:
        _refuse_owned(function)
        key = (id(function), made, dtype)  # of a function that is declared again, in a forward
        if key not in _kept:
            _kept[key] = DeclaredFunction(function, made, dtype)
        return _kept[key]

    return declared


@takes(linear=_NAMES, sizes=optional(TEXTS), random=FLAG, audit=FLAG)
def register_operator(
    operator: Any,
    rule: str,
    *,
    linear: Sequence[str] = (),
    sizes: Mapping[str, str] | None = None,
    random: bool = False,
    audit: bool = True,
) -> None:
    """Say how an operator works on parts of its arguments, so that plans may split what it computes.

    Args:
        operator: of `torch.library`: `"my::attn"`, `torch.ops.my.attn`, one of its overloads, or what `custom_op` made;
            or a subclass of `torch.autograd.Function`, whose `apply` is then known by the rule.
        rule: a term for each tensor argument, and behind `->` for each result; see docs/operators.md.
        linear: arguments through which a sum that is still to be made may pass.
        sizes: arguments that count a dim, with its name: `{"num_heads": "h"}`.
        random: whether it draws random numbers. Each rank then draws those of its part, as of a dropout.
        audit: whether the rule may be tried on random numbers; if not, a program says that it assumes it.

    Raises:
        OperatorRuleError: TP022 with the place in the rule.

    Example:
        >>> @torch.library.custom_op("readme::doubled", mutates_args=())
        ... def doubled(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> tpplan.register_operator("readme::doubled", "... n -> ... n", linear=["x"])
    """
    if isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
        if linear or sizes:
            raise refused(
                f"`{operator.__name__}` is an autograd function, whose rule knows neither `linear` nor `sizes`",
                "leave them out, or make it an operator of `torch.library`",
            )
        kind = cast("Any", operator)
        apply: Any = cast("Any", super(kind, kind)).apply  # whatever rule it had, or a class that it derives from
        held = replace(read_or_refuse(rule, f"the rule of {operator.__name__}"), random=random)
        _refuse_lists(held)
        declared = DeclaredFunction(apply, replace(held, audit=audit), None)
        declared.__name__ = operator.__name__
        kind.apply = _Applied(operator, declared)
        return
    register_by_name(operator, rule, linear=linear, sizes=sizes, random=random, audit=audit)


class _Applied:
    """`apply` of a class that has a rule, which classes that derive from it haven't."""

    def __init__(self, owner: type, declared: DeclaredFunction) -> None:
        self._owner = owner
        self._declared = declared

    def __get__(self, instance: Any, kind: Any) -> Any:
        return self._declared if kind is self._owner else super(self._owner, kind).apply  # pyright: ignore


def _refuse_lists(rule: OperatorRule) -> None:
    if sum(len(term.items) == 1 for term in rule.operands) > 1 or any(term.items for term in rule.results):
        raise refused(
            "a rule of a function has two lists of tensors of any length, or one among its results",
            "write a term for each tensor: `[b h, b h]`, and results one by one",
        )


def _refuse_owned(function: Any) -> None:
    """Refuse functions of which one sees that they compute with more than their arguments."""
    inner = function
    held: list[Any] = []
    while isinstance(inner, functools.partial):
        partial = cast("functools.partial[Any]", inner)
        held += [*partial.args, *partial.keywords.values()]
        inner = partial.func
    cells = getattr(inner, "__closure__", None) or ()
    held += [inner, getattr(inner, "__self__", None), *(cell.cell_contents for cell in cells if _is_filled(cell))]
    owner = next((item for item in held if isinstance(item, (torch.nn.Module, Tensor))), None)
    if owner is not None:
        raise refused(
            f"a function with a rule holds a {type(owner).__name__}, of which the rule says nothing",
            "declare a function that is given all its tensors, and whatever else it depends on",
        )


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


__all__ = ["SPACE", "DeclaredFunction", "operator", "register_operator"]

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

from tpplan.compat import flattened_tree, has_function_mode, rebuilt_tree
from tpplan.ops.declared import declare, read_or_refuse, refused, register_by_name
from tpplan.ops.dims import dims_of, leading_dims, shape_of, sizes_of
from tpplan.plan.operator_rule import OperatorRule, Term

_SPACE = "tpplan_declared"
_library = torch.library.Library(_SPACE, "DEF")
_numbers = itertools.count()
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


class DeclaredFunction:
    """A function with a rule; what `operator` returns."""

    def __init__(self, function: Callable[..., Any], rule: OperatorRule, dtype: torch.dtype | None) -> None:
        """See `operator`."""
        functools.update_wrapper(self, function)
        self.function = function
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self._rule = rule
        self._dtype = dtype
        self._calls: dict[str, tuple[Any, list[Any]]] = {}
        self._operators: dict[int, Any] = {}

    def __get__(self, instance: Any, owner: type) -> DeclaredFunction:
        if instance is None or not isinstance(instance, torch.nn.Module):
            return self
        raise refused(
            f"the method `{self.__name__}` of a module has a rule, which says nothing of what the module holds",
            "declare a function that is given all its tensors, and call that in the method",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or record that it was called."""
        first = next((held for held in (*args, *kwargs.values()) if isinstance(held, Tensor)), None)
        if has_function_mode():
            given = () if first is None else (first,)
            return handle_torch_function(self, given, *args, **kwargs)  # one step of a body, whatever it does
        if first is None or not first.is_meta:
            return self.function(*args, **kwargs)
        leaves, form = flattened_tree((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) not in self._operators:
            self._operators[len(tensors)] = self._define(self._terms(len(tensors)))
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call = f"{form} {[_shown(leaf) for leaf in leaves]}"
        self._calls.setdefault(call, (form, others))
        made = self._operators[len(tensors)](tensors, call)
        return made[0] if len(self._rule.results) == 1 else tuple(made)

    def __deepcopy__(self, memo: Any) -> DeclaredFunction:
        return self  # as functions are, in copies of what holds them

    def _terms(self, tensors: int) -> list[Term]:
        """The terms of so many tensors: `_` may stand for an argument that is None."""
        terms = [*self._rule.operands]
        if len(terms) != tensors:
            terms = [term for term in terms if term.dims is not None]
        if len(terms) != tensors:
            raise refused(
                f"`{self.__name__}` is called with {tensors} tensors, and its rule has terms for "
                f"{len(self._rule.operands)}",
                "write a term for each tensor that it is called with, in order, and `_` for one that may be None",
            )
        return terms

    def _define(self, terms: list[Term]) -> Any:
        """One operator for the function on such tensors, and one for its backward."""
        kind = getattr(self.function, "__name__", "function").strip("_<>") or "function"
        name = f"{kind}_{next(_numbers)}"
        _library.define(f"{name}(Tensor[] tensors, str call) -> Tensor[]")
        _library.define(f"{name}_backward(Tensor?[] gradients, Tensor[] tensors, str call) -> Tensor[]")
        _library.impl(name, self._run, "CompositeExplicitAutograd")
        _library.impl(f"{name}_backward", self._run_backward, "CompositeExplicitAutograd")
        space: Any = getattr(torch.ops, _SPACE)
        backward: Any = getattr(space, f"{name}_backward")

        def derive(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, None]:
            made = backward(list(gradients), ctx.tensors, ctx.call)
            return [g if _is_differentiable(t) else None for g, t in zip(made, ctx.tensors, strict=True)], None

        def setup(ctx: Any, inputs: tuple[Any, str], output: Any) -> None:
            ctx.tensors, ctx.call = inputs

        torch.library.register_autograd(f"{_SPACE}::{name}", derive, setup_context=setup, lib=_library)
        declare(f"{_SPACE}::{name}", self._as_list(terms, self._rule.results))
        declare(
            f"{_SPACE}::{name}_backward",
            replace(
                self._as_list(terms, terms),
                operands=(Term((), self._rule.results), Term((), tuple(terms))),
                derived=True,
            ),
        )
        return getattr(space, name)

    def _as_list(self, operands: Sequence[Term], results: Sequence[Term]) -> OperatorRule:
        return replace(self._rule, operands=(Term((), tuple(operands)),), results=(Term((), tuple(results)),))

    def _filled(self, tensors: Sequence[Tensor], call: str) -> Any:
        form, leaves = self._calls[call]
        given = iter(tensors)
        args, kwargs = rebuilt_tree([next(given) if held is _TENSOR else held for held in leaves], form)
        return self.function(*args, **kwargs)

    def _run(self, tensors: Sequence[Tensor], call: str) -> list[Tensor]:
        if not tensors[0].is_meta:
            made = self._filled(tensors, call)
            return [made] if isinstance(made, Tensor) else list(made)
        pairs = zip(self._terms(len(tensors)), tensors, strict=True)
        named = [(dims_of(term, held.dim()), tuple(held.shape)) for term, held in pairs if term.dims is not None]
        counts = sizes_of(named)
        leading = leading_dims(counts)
        dtype = self._dtype or tensors[0].dtype
        return [torch.empty(shape_of(term, counts, leading), dtype=dtype, device="meta") for term in self._rule.results]

    def _run_backward(self, gradients: Sequence[Tensor | None], tensors: Sequence[Tensor], call: str) -> list[Tensor]:
        if tensors[0].is_meta:
            return [torch.empty_like(held) for held in tensors]
        inputs = [held.detach().requires_grad_(_is_differentiable(held)) for held in tensors]
        with torch.enable_grad():
            results = self._run(inputs, call)
        wanted = [held for held in inputs if held.requires_grad]
        pairs = [(made, given) for made, given in zip(results, gradients, strict=True) if given is not None]
        found: Iterator[Tensor | None] = iter(
            torch.autograd.grad([m for m, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        )
        made = [next(found) if held.requires_grad else None for held in inputs]
        return [torch.zeros_like(held) if own is None else own for own, held in zip(made, inputs, strict=True)]


_TENSOR = object()


def _shown(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    if isinstance(leaf, (torch.SymInt, torch.SymFloat)):
        return str(leaf)
    return repr(leaf) if isinstance(leaf, _PLAIN) else f"{type(leaf).__name__} {id(leaf)}"  # `_calls` keeps it


def operator(
    rule: str,
    *,
    linear: Sequence[str] = (),
    random: bool = False,
    audit: bool = True,
    dtype: torch.dtype | None = None,
) -> Callable[[Callable[..., Any]], DeclaredFunction]:
    """Declare how a function of Python works on parts of its tensors; the model then calls what comes back.

        flash = tpplan.operator("b s! h d!, b t! h d!, b t! h d! -> b s! h d!")(flash_attn_func)

    Args:
        rule: a term for each tensor that the function is given, in order, and behind `->` for each result.
        linear, random, audit: see `register_operator`.
        dtype: of the results; that of the first tensor unless given.

    Raises:
        OperatorRuleError: TP022 with the place in the rule.
    """
    made = replace(read_or_refuse(rule, "the rule"), linear=tuple(linear), random=random, audit=audit)
    return lambda function: DeclaredFunction(function, made, dtype)


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
        random: whether it draws random numbers: it is kept whole then.
        audit: whether the rule may be tried on random numbers; if not, a program says that it assumes it.

    Raises:
        OperatorRuleError: TP022 with the place in the rule.
    """
    if isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
        before = cast("Any", operator).apply
        apply = before.function if isinstance(before, DeclaredFunction) else before  # of an earlier rule
        held = replace(read_or_refuse(rule, f"the rule of {operator.__name__}"), linear=tuple(linear), random=random)
        operator.apply = staticmethod(DeclaredFunction(apply, replace(held, audit=audit), None))  # pyright: ignore
        return
    register_by_name(operator, rule, linear=linear, sizes=sizes, random=random, audit=audit)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


__all__ = ["DeclaredFunction", "operator", "register_operator"]

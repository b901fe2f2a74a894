"""Assemblies: how a tensor of a class of its own, such as a quantised weight, is put together of its inner tensors.

in:  a tensor that torch can take apart (`__tensor_flatten__`)
out: the names of its parts; a tensor of the same class, of these parts or of a rank's

    Int8(codes (64, 32), scales (64, 1))   of (32, 32) and (32, 1)   ->   Int8 (32, 32)

What else its class knows of a rank's part, such as the shape of its blocks, is what the class's own slicing says.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.compat.modes import under_function_modes, without_dispatch_modes
from tpplan.compiler.ir.kept_tensors import Shape, WrapperError, contiguous, is_wrapper, wrapper_on_meta
from tpplan.state.content import Reader

ASSEMBLIES = "_tpplan_assemblies"
"""The attribute of a module's class with the assemblies of its weights, by name."""
UNFROZEN = "it requires grad, as `nn.Parameter` makes it unless told otherwise, and its parts can't"
"""Why a weight that can be trained isn't taken apart."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A tensor of a module, in parts that the module has in its place.

    Attributes:
        leaf: its name.
        example: a copy on `meta`.
        names: of its inner tensors, as its class calls them.
        context: what else its class keeps.
        noted: what others keep on it.
    """

    leaf: str
    example: Tensor
    names: tuple[str, ...]
    context: Any
    noted: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    _known: dict[tuple[Shape, ...], tuple[Shape, Shape, Any]] = field(default_factory=dict[Any, Any], repr=False)

    @classmethod
    def of(cls, tensor: Tensor, leaf: str) -> Assembly:
        """That of a tensor, which is `leaf` of its module.

        Raises:
            WrapperError: it can't be taken apart.
        """
        kind: Any = type(tensor)
        if not is_wrapper(tensor):
            raise WrapperError("torch can't take it apart: its class has no `__tensor_flatten__`")
        names, context = kind.__tensor_flatten__(tensor)
        inner: dict[str, Tensor] = {name: getattr(tensor, name) for name in names}
        other = next((held for held in inner.values() if type(held) not in (Tensor, nn.Parameter)), None)
        if other is not None:
            raise WrapperError(f"what it keeps is again of a class of its own, a `{type(other).__name__}`")
        if tensor.requires_grad or any(held.requires_grad for held in inner.values()):
            raise WrapperError(UNFROZEN)
        try:
            assembly = cls(leaf, wrapper_on_meta(tensor), tuple(names), context)
            made = assembly.made({name: getattr(assembly.example, name) for name in names})
        except Exception as error:  # whatever a class says of being put together
            raise WrapperError(f"it can't be put together of its parts again: {error}") from error
        if type(made) is not kind or made.shape != tensor.shape or made.dtype != tensor.dtype:
            raise WrapperError("its parts make another tensor")
        noted = {name: held for name, held in vars(tensor).items() if name not in vars(made) and name != "_is_param"}
        if any(isinstance(held, Tensor) for held in noted.values()):
            raise WrapperError("it keeps a tensor that its `__tensor_flatten__` doesn't give")
        assembly.noted.update(noted)
        return assembly

    @property
    def parts(self) -> dict[str, str]:
        """What the module calls its inner tensors: `weight` of `codes` has `_weight_codes`."""
        return {name: f"_{self.leaf}_{name}" for name in self.names}

    def made(self, inner: Mapping[str, Tensor]) -> Tensor:
        """The tensor of these inner tensors, which are whole, or a rank's parts of them."""
        shapes = tuple(tuple(inner[name].shape) for name in self.names)
        if shapes not in self._known:
            with without_dispatch_modes(), under_function_modes():
                shape, context = self._cut(shapes)
                self._known[shapes] = shape, contiguous(shape), context
        shape, stride, context = self._known[shapes]
        kind: Any = type(self.example)
        made: Tensor = kind.__tensor_unflatten__(dict(inner), context, shape, stride)
        vars(made).update(self.noted)
        return made

    def other_context(self, tensor: Tensor) -> bool:
        """Whether a tensor of this class, whole or a part, keeps something else beside its inner tensors."""
        inner = {name: torch.empty_like(getattr(tensor, name), device="meta") for name in self.names}
        kept: Any = [type(each).__tensor_flatten__(each) for each in (tensor, cast("Any", self.made(inner)))]  # pyright: ignore
        return kept[0][1] != kept[1][1] and len({Reader({})(each) for each in kept}) > 1

    def dims_of(self, name: str) -> tuple[int | None, ...]:
        """By dim of an inner tensor, the dim of the whole with which the class's own slicing cuts it."""
        whole, shape = self._inner(self.example, name), tuple(self.example.shape)
        found: list[int | None] = [None] * len(whole)
        for outer, count in enumerate(shape):
            cut = self._sliced((*shape[:outer], count // 2, *shape[outer + 1 :]))
            here = whole if cut is None else self._inner(cut, name)
            found = [outer if n != of else known for n, of, known in zip(here, whole, found, strict=True)]
        return tuple(found)

    def _cut(self, shapes: tuple[Shape, ...]) -> tuple[Shape, Any]:
        """The shape, and what else is kept, of what has inner tensors of these shapes."""
        whole, shape = self._shapes(self.example), tuple(self.example.shape)
        changed = [
            (min(dim, len(shape) - 1), n, of)
            for here, every in zip(shapes, whole, strict=True)
            for dim, (n, of) in enumerate(zip(here, every, strict=True))
            if n != of
        ]
        if not changed:
            return shape, self.context
        likeliest: Shape | None = None
        for outer in itertools.permutations(range(len(shape))):  # which dim of the whole each of theirs stands for
            sizes = {outer[dim]: shape[outer[dim]] * n // of for dim, n, of in changed}
            local = tuple(sizes.get(dim, count) for dim, count in enumerate(shape))
            cut = self._sliced(local)
            if cut is not None and self._shapes(cut) == shapes:
                return tuple(cut.shape), type(cut).__tensor_flatten__(cut)[1]  # pyright: ignore
            likeliest = likeliest or local
        assert likeliest is not None
        return likeliest, _resized(self.context, shape, likeliest)

    def _sliced(self, local: Shape) -> Tensor | None:
        """The first entries of each dim, as the class itself slices it; None if it doesn't."""
        cut = self.example
        try:
            with torch.no_grad():
                for dim, (size, count) in enumerate(zip(local, self.example.shape, strict=True)):
                    cut = cut if size == count else torch.narrow(cut, dim, 0, size)
        except Exception:  # it has no slices, or none there
            return None
        return cut if type(cut) is type(self.example) else None

    def _shapes(self, tensor: Tensor) -> tuple[Shape, ...]:
        return tuple(self._inner(tensor, name) for name in self.names)

    @staticmethod
    def _inner(tensor: Tensor, name: str) -> Shape:
        return tuple(getattr(tensor, name).shape)


def _resized(kept: Any, shape: Shape, local: Shape) -> Any:
    """What a class without such slices keeps, with a rank's sizes for the whole's in what has a number for each dim.

    So have the shapes of blocks, strides, and texts of these (`str(list(size))`). That it is right is what the proof of
    the body says, which runs with it.
    """
    kind, plain = cast("Any", type(kept)), kept
    if isinstance(kept, str):
        try:
            read = ast.literal_eval(kept)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return kept
        made = _resized(read, shape, local)
        return kept if made == read else str(made)
    if isinstance(kept, dict):
        return {key: _resized(held, shape, local) for key, held in plain.items()}
    if not isinstance(kept, (list, tuple)) or len(plain) != len(shape) or any(type(n) is not int for n in plain):
        return plain
    if tuple(plain) == contiguous(shape):
        return kind(contiguous(local))
    return kind([here if n == of else n for n, of, here in zip(plain, shape, local, strict=True)])


def assemblies_of(module: nn.Module) -> Mapping[str, Assembly]:
    """Those of a module that has parts in the place of some of its tensors."""
    return getattr(type(module), ASSEMBLIES, {})


__all__ = ["ASSEMBLIES", "UNFROZEN", "Assembly", "assemblies_of"]

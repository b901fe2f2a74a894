"""Whether a class's constructor only puts modules together, in the order in which it registers them.

It is read, not run. What is allowed is little: `self.name = …` and `self.name.append(…)` of modules made on the spot,
loops and conditions, arithmetic, and some of Python's own functions. All else may initialise, draw, tie or copy.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import textwrap
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from torch import nn

_PURE: frozenset[Any] = frozenset(
    getattr(builtins, name)
    for name in ("range", "len", "int", "float", "bool", "str", "list", "tuple", "dict", "zip", "enumerate", "max",
                 "min", "sum", "abs", "round", "getattr", "hasattr", "isinstance", "print", "pow", "super", "divmod")
)  # fmt: skip
_MATH: frozenset[Any] = frozenset(held for held in vars(math).values() if callable(held))
# Whatever is made in their arguments is kept, in that order.
_KEEPING: frozenset[Any] = frozenset((nn.Sequential, nn.ModuleList, nn.ModuleDict, list, tuple, dict))
_REFUSED = (
    *(ast.With, ast.AsyncWith, ast.Try, ast.Delete, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.ClassDef, ast.NamedExpr, ast.Import, ast.ImportFrom, ast.Yield, ast.YieldFrom, ast.Await, ast.Match),
)
_OWN = ("__new__", "__setattr__", "register_parameter", "register_buffer", "register_module", "add_module")


@functools.lru_cache(maxsize=1024)
def why_not_plain(kind: type[nn.Module], children: frozenset[str], drawn: frozenset[str]) -> str:
    """What a class outside of torch does, when a module is made, that may be more than putting modules together.

    Args:
        kind: the class.
        children: the names by which its modules are registered.
        drawn: those of them that have tensors.

    Returns:
        The reason in words; empty if there is none.
    """
    if type(kind) is not type:
        return "its class has a metaclass"
    assigned: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn."):
            break
        own = next((name for name in _OWN if name in vars(base)), None)
        if own is not None:
            return f"it has a `{own}` of its own"
        if "__init__" in vars(base) and (reason := _why_not(vars(base)["__init__"], children, assigned)):
            return reason
    others = sorted(drawn - assigned)
    return f"its `{others[0]}` was made elsewhere" if others else ""


def _why_not(constructor: Any, children: frozenset[str], assigned: set[str]) -> str:
    unread = "its `__init__` can't be read"
    if not isinstance(constructor, FunctionType) or hasattr(constructor, "__wrapped__"):
        return unread
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(constructor))).body[0]
    except (OSError, TypeError, SyntaxError):
        return unread
    if not isinstance(tree, ast.FunctionDef):
        return unread
    reader = _InitialReader(constructor, tree, children, assigned)
    for statement in tree.body:
        reader.visit(statement)
    if reader.reason is None:
        return ""
    line, text = reader.reason
    return f"its `__init__` {text}, in line {constructor.__code__.co_firstlineno + line - 1}"


class _InitialReader(ast.NodeVisitor):
    """Walks through a constructor, and keeps the first thing that isn't allowed.

    Attributes:
        reason: the line of that, and what it is.
    """

    def __init__(
        self, constructor: FunctionType, tree: ast.FunctionDef, children: frozenset[str], assigned: set[str]
    ) -> None:
        self.reason: tuple[int, str] | None = None
        self._known = _known_names(constructor, tree)
        self._self = tree.args.args[0].arg if tree.args.args else ""
        self._children = children
        self._assigned = assigned
        self._keeps = False  # whether what is made here is registered
        self._loops = 0

    def visit(self, node: ast.AST) -> None:
        """Look at a node, unless something was refused before."""
        if isinstance(node, _REFUSED):
            self._refuse(node, f"has more than assignments (`{type(node).__name__}`)")
        elif self.reason is None:
            super().visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Only one side runs."""
        self.visit(node.test)
        before = set(self._assigned)
        self._all(node.body)
        other = set(self._assigned)
        self._assigned.intersection_update(before)
        self._all(node.orelse)
        self._assigned |= other

    def visit_For(self, node: ast.For | ast.While) -> None:
        """What is assigned in a loop may be assigned again."""
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    visit_While = visit_For

    def visit_Assign(self, node: ast.Assign) -> None:
        """`self.name = …`, or numbers for a name of its own."""
        self._assign(node, node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """As an assignment."""
        if node.value is not None:
            self._assign(node, [node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Of a name of its own alone."""
        if not isinstance(node.target, ast.Name):
            self._refuse(node, f"changes `{ast.unparse(node.target)}`")
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Nothing that is a tensor's memory."""
        if node.attr in ("data", "grad"):
            self._refuse(node, f"uses `{ast.unparse(node)}`")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Modules stay in the order in which they are made."""
        if self._makes(node):
            self._refuse(node, "picks out of modules that it makes")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Modules that are kept, and functions that do nothing else."""
        called, keeps = self._resolved(node.func), self._keeps
        if isinstance(called, type) and issubclass(called, nn.Module):
            if not keeps:
                self._refuse(node, f"makes a `{called.__name__}` that it doesn't keep")
            self._keeps = called in _KEEPING
        elif self._appends(node.func):
            self._keeps = True
        elif self._is_pure(called, node.func):
            self._keeps = keeps and called in _KEEPING
        else:
            self._refuse(node, f"calls `{ast.unparse(node.func)}`")
        self._all([*node.args, *(keyword.value for keyword in node.keywords)])
        self._keeps = keeps

    # -- what is allowed ------------------------------------------------------------------------------------------
    def _all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _assign(self, node: ast.AST, targets: Sequence[ast.expr], value: ast.expr) -> None:
        own = [target.attr for target in targets if isinstance(target, ast.Attribute) and self._is_self(target.value)]
        makes = self._makes(value)
        others = [target for target in _single(targets) if not self._is_assignable(target)]
        if others:
            self._refuse(node, f"changes `{ast.unparse(others[0])}`")
        elif makes and (len(own) < len(targets) or self._loops or not self._children.issuperset(own)):
            self._refuse(node, "makes modules that it doesn't keep under one name")
        elif makes and not self._assigned.isdisjoint(own):
            self._refuse(node, f"makes `{own[0]}` twice")
        if makes:
            self._assigned.update(own)
        self._keeps = makes
        self.visit(value)
        self._keeps = False

    def _is_assignable(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and self._is_self(target.value))

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self._self

    def _makes(self, node: ast.AST) -> bool:
        """Whether a module is made somewhere in an expression."""
        calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        kinds = [self._resolved(call.func) for call in calls]
        return any(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)

    def _appends(self, function: ast.expr) -> bool:
        """Whether it is the `append` of one of the module's own lists of modules."""
        if not isinstance(function, ast.Attribute) or function.attr != "append":
            return False
        of = function.value
        return isinstance(of, ast.Attribute) and self._is_self(of.value) and of.attr in self._assigned

    def _is_pure(self, called: Any, function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute) and function.attr == "__init__":  # a base's, which is read as well
            return isinstance(function.value, ast.Call) and self._resolved(function.value.func) is super
        if isinstance(called, type) and issubclass(called, BaseException):
            return True
        try:
            return called in _PURE or called in _MATH
        except TypeError:  # what can't be hashed
            return False

    def _resolved(self, node: ast.expr) -> Any:
        """What a dotted name stands for; None if that isn't known before the constructor runs."""
        if isinstance(node, ast.Attribute):
            of = self._resolved(node.value)
            return None if of is None else getattr(of, node.attr, None)
        return self._known.get(node.id) if isinstance(node, ast.Name) else None

    def _refuse(self, node: ast.AST, text: str) -> None:
        if self.reason is None:
            self.reason = (getattr(node, "lineno", 1), text)


def _single(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from _single(target.elts)
        else:
            yield target


def _known_names(constructor: FunctionType, tree: ast.FunctionDef) -> dict[str, Any]:
    """The names that stand for the same thing whenever the constructor runs."""
    names: dict[str, Any] = vars(builtins) | constructor.__globals__
    for name, cell in zip(constructor.__code__.co_freevars, constructor.__closure__ or (), strict=True):
        names[name] = cell.cell_contents
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names.pop(node.arg, None)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.pop(node.id, None)
    return names


__all__ = ["why_not_plain"]

# pyright: reportPrivateUsage=false
"""Autograd: nodes, tasks, saved tensors and activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointFunction

_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active  # pyright: ignore


def inside_transform() -> bool:
    """Whether a transform of torch.func is under way, such as `vmap`, or forward-mode differentiation.

    For every torch.
    """
    return _transforms() or forward_ad._current_level >= 0  # pyright: ignore


def native_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without torch's Python around it, which takes as long again as the call itself.

    What that Python adds is support for `setup_context` under torch.func; without it, torch refuses such calls itself.
    For every torch.
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore


PythonNode = torch.autograd.function.BackwardCFunction
"""What autograd calls in the backward of a function that is written in Python: its `apply` runs that backward."""


@dataclass(frozen=True, slots=True)
class FunctionNode:
    """A `PythonNode` taken apart.

    Attributes:
        name: the class's name.
        outputs: shape and dtype of each result, as autograd fills in zeros for those without a gradient.
        inputs: for each argument that requires grad, its position, and the node and the output that it came from.

    For every torch.
    """

    name: str
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    inputs: tuple[tuple[int, Any, int], ...]


def function_node(node: Any) -> FunctionNode:
    """What autograd knows of a function's call. For every torch."""
    wanted = [position for position, wants in enumerate(node.needs_input_grad) if wants]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return FunctionNode(
        node._forward_cls.__qualname__.replace("<locals>.", ""),
        tuple((tuple(held.shape), held.dtype) for held in node._input_metadata),
        tuple((place, source, number) for place, (source, number) in zip(wanted, edges, strict=True)),
    )


def backward_code(node: Any) -> CodeType | None:
    """The code of a function's backward, where it is written in Python. For every torch."""
    return getattr(getattr(node._forward_cls, "backward", None), "__code__", None)


def is_reentrant_checkpoint(node: Any) -> bool:
    """Whether a `PythonNode` is that of torch's activation checkpointing, with `use_reentrant=True`.

    For every torch.
    """
    return node._forward_cls is CheckpointFunction


def packs_saved_tensors(also_of_torch: bool = False) -> object:
    """The innermost hook on what autograd saves for the backward; of torch's own if wanted, not a checkpoint's.

    For every torch.
    """
    pack = saving_hook()
    foreign = "torch.utils.checkpoint." if also_of_torch else "torch."
    return None if f"{getattr(pack, '__module__', None)}.".startswith(foreign) else pack


def saving_hook() -> object:
    """The innermost hook on what autograd saves for the backward, a checkpoint's or any other; None without one.

    For every torch.
    """
    hooks: Any = cast("Any", torch._C)._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def is_checkpointed() -> bool:
    """Whether an activation checkpoint counts what autograd saves for the backward. For every torch."""
    return getattr(saving_hook(), "__module__", None) == "torch.utils.checkpoint"


@contextmanager
def without_packing() -> Generator[None]:
    """A block in which autograd keeps what it saves as it is, whatever hooks there are: nothing is recomputed.

    For every torch.
    """
    hooks: Any = cast("Any", torch._C)._autograd
    before: bool = hooks._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        hooks._saved_tensors_hooks_set_tracing(before)


@contextmanager
def without_saved_tensor_hooks() -> Generator[None]:
    """A block outside of all hooks on what autograd saves for the backward, and of a ban on them. For every torch."""
    hooks: Any = cast("Any", torch._C)._autograd
    banned: str | None = hooks._saved_tensors_hooks_get_disabled_error_message()
    hooks._saved_tensors_hooks_enable()
    held: list[tuple[Any, Any]] = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        held.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(held):
            hooks._push_saved_tensors_default_hooks(*pair)
        if banned is not None:
            hooks._saved_tensors_hooks_disable(banned)


def runs_backward() -> bool:
    """Whether this thread is in a backward: what runs there is an activation checkpoint's forward, once more.

    For every torch.
    """
    return running_backward() != -1


def recomputes() -> bool:
    """Whether what runs in a backward is a forward once more: of an activation checkpoint, or in a user's function.

    For every torch.
    """
    if not runs_backward():
        return False
    forward_class = getattr(torch._C._current_autograd_node(), "_forward_cls", None)  # pyright: ignore
    return is_checkpointed() or not (getattr(forward_class, "__module__", None) or "tpplan").startswith("tpplan")


def running_backward() -> int:
    """The number of the backward that this thread runs; -1 outside of one. For every torch."""
    return torch._C._current_graph_task_id()  # pyright: ignore


def next_node_number() -> int:
    """The number of the next node of a graph that this thread makes. For every torch."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore


def running_node_number() -> int | None:
    """The number of the node whose backward this thread runs; None outside of one. For every torch."""
    node = torch._C._current_autograd_node()  # pyright: ignore
    return None if node is None else node._sequence_nr()  # pyright: ignore


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward under way, in which a hook asks for it, has ended. For every torch."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore


def node_number(node: Any) -> int:
    """The number of a node of a graph; later ones have larger numbers. For every torch."""
    return node._sequence_nr()


def saved_tensors_of(node: Any) -> list[torch.Tensor]:
    """The tensors that a node of a graph keeps for its backward. For every torch."""
    if isinstance(node, PythonNode):
        held: list[Any] = [*node.saved_tensors, *vars(node).values()]  # pyright: ignore
    else:
        held = [_saved(node, name) for name in dir(node) if name.startswith("_saved_")]
    flat: list[Any] = []
    for one in held:
        flat += one if isinstance(one, (list, tuple)) else [one]
    return [item for item in flat if isinstance(item, torch.Tensor)]


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:  # written to since: its backward raises as well
        return None

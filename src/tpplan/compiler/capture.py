"""Capture: run a model once on meta tensors and record what it does.

in:  a skeleton (no numbers, no GPU, no process group) and an example call
out: `Trace`: every aten operation, in the module call it happened in, dead ones removed

    h = self.norm(x)   ->   Frame("norm", entries=x→x', body=(native_layer_norm x'→y',), exits=y'→h)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.compat import is_registered_container, rebuild_container
from tpplan.compiler.recorder import OpenFrame, Recorder
from tpplan.compiler.skeleton import Skeleton
from tpplan.compiler.trace import Crossing, Frame, Operation, Path, Trace


def capture(skeleton: Skeleton, arguments: Sequence[Any], keywords: Mapping[str, Any], training: bool) -> Trace:
    """Run `skeleton` on an example call and return the trace.

    Args:
        skeleton: its modules' `forward` are wrapped in place; don't use it for anything else afterwards.
        arguments, keywords: the call; tensors may lie on any device, only their geometry counts.
        training: the mode to run in.

    Raises:
        Exception: whatever the model raises on these inputs.
    """
    recorder = Recorder()
    calls: dict[str, int] = {}
    skeleton.model.train(training)
    parameters: dict[int, tuple[str, ...]] = {}
    for parameter, names in skeleton.parameters:
        parameters[recorder.new_value(parameter, parameter.requires_grad)] = names
    for name, module in skeleton.model.named_modules():
        _wrap(module, name, recorder, calls)
    example = _to_meta((tuple(arguments), dict(keywords)))
    inputs = tuple(recorder.value_of(tensor) for tensor in _leaves(example))
    outer = OpenFrame("", 0, [])
    recorder.frames.append(outer)
    with recorder, torch.enable_grad():
        skeleton.model(*example[0], **example[1])
    (root,) = (node for node in outer.body if isinstance(node, Frame))
    return Trace(
        _without_dead_operations(root),
        tuple(recorder.values),
        parameters,
        inputs,
        training,
        tuple(dict.fromkeys(recorder.assumptions)),
    )


def _wrap(module: nn.Module, name: str, recorder: Recorder, calls: dict[str, int]) -> None:
    forward = module.forward
    names = argument_names(type(module).forward)

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = calls.get(name, 0)
        calls[name] = call + 1
        frame = OpenFrame(name, call, [])
        entries: list[Crossing] = []
        memo: dict[int, Tensor] = {}
        inner_args = tuple(
            _cross(arg, (names[i] if i < len(names) else f"*{i}",), recorder, entries, memo)
            for i, arg in enumerate(args)
        )
        inner_kwargs = {key: _cross(arg, (key,), recorder, entries, memo) for key, arg in kwargs.items()}
        recorder.frames.append(frame)
        try:
            result = forward(*inner_args, **inner_kwargs)
        finally:
            recorder.frames.pop()
        exits: list[Crossing] = []
        result = _cross(result, (), recorder, exits, {}, outward=True)
        recorder.frames[-1].body.append(Frame(name, call, tuple(entries), tuple(exits), tuple(frame.body)))
        return result

    module.__dict__["forward"] = recorded


@functools.cache
def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names by which a `forward`'s positional arguments can be passed, without `self`."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)[1:]


def _cross(
    held: Any, path: Path, recorder: Recorder, crossings: list[Crossing], memo: dict[int, Tensor], outward: bool = False
) -> Any:
    """Replace every tensor in `held` by an alias with its own value.

    Lists and dicts passed *in* are left alone: a body may write to them. Their tensors are then read across the
    boundary, and no reshard can be put there.
    """
    if isinstance(held, Tensor):
        if id(held) in memo:
            return memo[id(held)]
        alias, source, target = recorder.cross(held)
        crossings.append(Crossing(path, source, target))
        memo[id(held)] = alias
        return alias

    def step(key: str | int, item: Any) -> Any:
        return _cross(item, (*path, key), recorder, crossings, memo, outward)

    if isinstance(held, tuple):
        items = [step(i, item) for i, item in enumerate(held)]  # pyright: ignore
        return type(held)(*items) if hasattr(held, "_fields") else tuple(items)  # pyright: ignore
    if not outward:
        return held
    if type(held) is list:
        return [step(i, item) for i, item in enumerate(held)]  # pyright: ignore
    if type(held) is dict:
        return {key: step(key, item) for key, item in held.items()}  # pyright: ignore
    if is_registered_container(held):
        if isinstance(held, dict):  # transformers' ModelOutput: name the path by its keys
            keys = iter(list(held))  # pyright: ignore
            return rebuild_container(held, lambda item: step(next(keys), item))
        count = iter(range(1 << 30))
        return rebuild_container(held, lambda item: step(next(count), item))
    return held


def _to_meta(held: Any) -> Any:
    if isinstance(held, Tensor):
        meta = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
        return meta.requires_grad_(held.requires_grad)
    if isinstance(held, tuple):
        items = [_to_meta(item) for item in held]  # pyright: ignore
        return type(held)(*items) if hasattr(held, "_fields") else tuple(items)  # pyright: ignore
    if isinstance(held, list):
        return [_to_meta(item) for item in held]  # pyright: ignore
    if isinstance(held, dict):
        return {key: _to_meta(item) for key, item in held.items()}  # pyright: ignore
    return held


def _leaves(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    if isinstance(held, (list, tuple)):
        return [leaf for item in held for leaf in _leaves(item)]  # pyright: ignore
    if isinstance(held, dict):
        return [leaf for item in held.values() for leaf in _leaves(item)]  # pyright: ignore
    return []


def _without_dead_operations(root: Frame) -> Frame:
    """Drop operations whose results nobody reads (autograd's own detaches, unused masks), and of the aliases that an
    in-place operation overwrites, those that nobody reads afterwards."""
    live = {crossing.source for crossing in root.exits}

    def clean(frame: Frame) -> Frame:
        body: list[Operation | Frame] = []
        for crossing in frame.exits:
            if crossing.target in live:
                live.add(crossing.source)
        for node in reversed(frame.body):
            if isinstance(node, Frame):
                body.append(clean(node))
                continue
            overwritten = tuple(identifier for identifier in node.overwritten if identifier in live)
            if overwritten or any(output in live for output in node.outputs):
                live.update(node.inputs)
                body.append(replace(node, overwritten=overwritten))
        live.update(crossing.source for crossing in frame.entries if crossing.target in live)
        return replace(frame, body=tuple(reversed(body)))

    return clean(root)

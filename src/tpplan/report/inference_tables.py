"""What a program costs where nothing is trained: parameters, a cache, a forward without gradients.

in:  an `Inference`, which `tpplan.calls.inference_cost` makes
out: text, and JSON
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from tpplan.cost.traffic import Traffic, memory
from tpplan.report.diagnostics import render as render_findings
from tpplan.report.grid import TOTAL_STYLE, new_table
from tpplan.report.program_communication import counts_text
from tpplan.report.program_page import to_text
from tpplan.report.quantities import bytes_text, count_text, path_text, shape_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ParameterPlacement, Program

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_RINGS = "Bytes that are sent are those of ring algorithms."
_TEMPORARY = (
    "Temporary is what there is at once beside the cache, at the most: activations, and the result. Attention is taken "
    "to be one kernel; what a kernel needs inside isn't counted."
)


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that a call leaves to the next, such as the keys of a layer.

    Attributes:
        path: where it sits, from the result or the argument that has it.
        dtype, itemsize: of its numbers.
        shape: in the unsharded model.
        local_shapes: on each rank.
    """

    path: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """In the unsharded model."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """On each rank."""
        return tuple(math.prod(shape) * self.itemsize for shape in self.local_shapes)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a call leaves to the next: keys and values, states.

    Attributes:
        tensors: in the order of the model.
        storage: on each rank, bytes of the memory behind the tensors; more than theirs where they are views.
        growth: on each rank, bytes that the next token adds; None where that isn't known.
    """

    tensors: tuple[KeptTensor, ...]
    storage: tuple[int, ...]
    growth: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """In the unsharded model."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        """On each rank."""
        return tuple(map(sum, zip(*(tensor.bytes_by_rank for tensor in self.tensors), strict=True)))


@dataclass(frozen=True, slots=True)
class Inference:
    """A plan's costs for inference.

    Attributes:
        program: of the first call, which takes a whole prompt.
        settings: what that call is given beside tensors.
        buffers: bytes of the model's buffers, which each rank holds whole.
        prefill, decode: the collectives of that call, and of the next, with one token for each sequence.
        kept: what the first call leaves to the next.
        unknown: for `kept` and `decode`, where they are None, why.
        temporary: the most bytes that the first call needs at once for what it computes and doesn't leave: in the
            unsharded model, then on each rank; empty where that isn't known.
        temporary_for_one: the same of the next call, on each rank.
    """

    program: Program
    settings: Mapping[str, Any]
    buffers: int
    prefill: Traffic
    decode: Traffic | None
    kept: Kept | None
    unknown: Mapping[str, str]
    temporary: tuple[int, ...] = ()
    temporary_for_one: tuple[int, ...] = ()


def render_inference(view: Inference, *, width: int = 100, color: bool = False) -> str:
    """The view as text of `width` columns."""
    kept = [_kept_table(view.kept)] if view.kept is not None else []
    notes = [Text(note) for note in _notes(view)]
    text = to_text([_headline(view), _memory_table(view), *kept, _traffic_table(view), *notes], width, color)
    findings = render_findings(view.program.diagnostics, color=color)
    return f"{text}\n\n{findings}" if findings else text


def inference_json(view: Inference) -> str:
    """The view as a JSON object."""
    program, kept = view.program, view.kept
    plain: dict[str, Any] = {"plan": program.plan, "model": program.model, "axis": program.axis, "size": program.size}
    plain["inputs"] = [{"path": path_text(i.path), "shape": i.shape, "dtype": i.dtype} for i in program.inputs]
    plain["settings"] = dict(view.settings)
    plain["parameters"] = [_memory_json(*row) for row in _by_dtype(program)]
    plain["buffers"] = view.buffers
    plain["cache"] = None if kept is None else _kept_json(kept)
    plain["temporary"] = _temporary_json(view)
    plain["prefill"] = _traffic_json(view.prefill)
    plain["decode"] = None if view.decode is None else _traffic_json(view.decode)
    plain["unknown"] = dict(view.unknown)
    return json.dumps(plain, indent=2, ensure_ascii=False)


# -- text ---------------------------------------------------------------------------------------------------------
def _headline(view: Inference) -> Text:
    program = view.program
    called = [f"{path_text(i.path)} {shape_text(i.shape)} {i.dtype}" for i in program.inputs]
    called += [f"{name}={value}" for name, value in view.settings.items()]
    text = Text(f"{program.model} with plan {program.plan} on {count_text(program.size, 'rank')}", style="bold")
    return text.append(f" (axis {program.axis}), for inference\ncalled with {', '.join(called)}", style="not bold")


def _memory_table(view: Inference) -> Table:
    table = new_table("memory", "", "whole", "each rank", "share", right=(1, 2, 3, 4))
    rows = list(_by_dtype(view.program))
    whole = local = 0
    for dtype, kind, parameters in rows:
        held = memory(parameters)
        _add(table, f"{kind} parameters, {dtype}", count_text(len(parameters), "tensor"), held.whole, held.local)
        whole, local = whole + held.whole, local + held.local
    if view.buffers:
        _add(table, "buffers", "", view.buffers, view.buffers)
        whole, local = whole + view.buffers, local + view.buffers
    if view.kept is not None:
        largest = max(view.kept.bytes_by_rank)
        _add(table, "cache", count_text(len(view.kept.tensors), "tensor"), view.kept.bytes, largest)
        whole, local = whole + view.kept.bytes, local + largest
    if view.temporary:
        most = max(view.temporary[1:])
        _add(table, "temporary", "", view.temporary[0], most)
        whole, local = whole + view.temporary[0], local + most
    table.rows[-1].end_section = True
    _add(table, "together", "", whole, local, TOTAL_STYLE)
    return table


def _add(table: Table, name: str, count: str, whole: int, local: int, style: str = "") -> None:
    share = f"{local / whole if whole else 1:.1%}"
    table.add_row(name, count, bytes_text(whole), bytes_text(local), share, style=style)


def _kept_table(kept: Kept) -> Table:
    table = new_table("cache", "whole → each rank", "", "each rank", right=(3,))
    groups: dict[tuple[object, ...], list[KeptTensor]] = {}
    for tensor in kept.tensors:
        key = (_NUMBER.sub("*", tensor.path), tensor.shape, tensor.local_shapes, tensor.dtype)
        groups.setdefault(key, []).append(tensor)
    for (name, *_), alike in groups.items():
        tensor = alike[0]
        local = " or ".join(map(shape_text, dict.fromkeys(tensor.local_shapes)))
        shapes = shape_text(tensor.shape) + ("" if local == shape_text(tensor.shape) else f" → {local}")
        title = f"{name} × {len(alike)}" if len(alike) > 1 else tensor.path
        table.add_row(title, shapes, tensor.dtype, bytes_text(max(tensor.bytes_by_rank) * len(alike)))
    return table


def _traffic_table(view: Inference) -> Table:
    table = new_table("each rank, without gradients", "", "sends", right=(2,))
    table.columns[1].no_wrap = False
    table.add_row("the call above", counts_text(view.prefill), bytes_text(view.prefill.total))
    if view.decode is not None:
        table.add_row("one token more", counts_text(view.decode), bytes_text(view.decode.total))
    return table


def _notes(view: Inference) -> Iterator[str]:
    kept = view.kept
    if kept is not None:
        if sum(kept.bytes_by_rank) > kept.bytes:
            times = f"{sum(kept.bytes_by_rank) / kept.bytes:.2f}".rstrip("0").rstrip(".")
            yield (
                f"The ranks hold {times} times the whole cache together: what several ranks use, such as key heads "
                "that are fewer than the ranks, each of them keeps."
            )
        if len(set(kept.bytes_by_rank)) > 1:
            yield f"By rank, the cache takes {', '.join(map(bytes_text, kept.bytes_by_rank))}."
        if kept.growth is not None:
            more = max(kept.growth)
            added = bytes_text(more) if more else "nothing"
            yield f"One token more for each sequence adds {added} to a rank's cache."
        if max(kept.storage) > max(kept.bytes_by_rank):
            behind = bytes_text(max(kept.storage))
            yield f"After the call above its tensors are views of {behind}, until the next token."
    if view.temporary_for_one:
        yield f"The call with one token more needs {bytes_text(max(view.temporary_for_one))} of temporary memory."
    yield from view.unknown.values()
    if view.temporary:
        yield _TEMPORARY
    yield _RINGS


def _by_dtype(program: Program) -> Iterator[tuple[str, str, list[ParameterPlacement]]]:
    for dtype in dict.fromkeys(parameter.dtype for parameter in program.parameters):
        for kind, sharded in (("sharded", True), ("replicated", False)):
            alike = [p for p in program.parameters if p.dtype == dtype and p.layout.is_sharded is sharded]
            if alike:
                yield dtype, kind, alike


# -- JSON ---------------------------------------------------------------------------------------------------------
def _memory_json(dtype: str, kind: str, parameters: list[ParameterPlacement]) -> dict[str, Any]:
    held = memory(parameters)
    return {"dtype": dtype, "placed": kind, "tensors": len(parameters), "bytes": held.whole, "bytes_a_rank": held.local}


def _temporary_json(view: Inference) -> dict[str, Any] | None:
    if not view.temporary:
        return None
    whole, *by_rank = view.temporary
    return {"bytes": whole, "bytes_by_rank": by_rank, "decode_bytes_by_rank": view.temporary_for_one}


def _kept_json(kept: Kept) -> dict[str, Any]:
    tensors = [
        {"path": t.path, "dtype": t.dtype, "shape": t.shape, "local_shapes": t.local_shapes} for t in kept.tensors
    ]
    sums = {"bytes": kept.bytes, "bytes_by_rank": kept.bytes_by_rank, "growth_by_rank": kept.growth}
    return {**sums, "storage_by_rank": kept.storage, "tensors": tensors}


def _traffic_json(traffic: Traffic) -> dict[str, Any]:
    return {"collectives": dict(traffic.counts), "sent": dict(traffic.sent), "bytes": traffic.total}


__all__ = ["Inference", "Kept", "KeptTensor", "inference_json", "render_inference"]

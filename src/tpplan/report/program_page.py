"""Rendering a program for a person: what it costs, where, and what becomes of each module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.text import Text

from tpplan.report.diagnostics import render as render_findings
from tpplan.report.program_communication import communication_table
from tpplan.report.program_kernels import kernel_table
from tpplan.report.program_outline import collapse, units, without_boundaries
from tpplan.report.program_tables import cost_table, memory_table, module_table
from tpplan.report.quantities import count_text, path_text, shape_text

if TYPE_CHECKING:
    from tpplan.compiler.ir.overlaps import Overlap
    from tpplan.compiler.ir.program import KernelUse, Program

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_LEGEND = """\
R: each rank holds the whole. S(d): split along dim d. P: the ranks' sum is the value. R·∂P: R, with a gradient that \
is P. summed: a parameter's P gradient, added up once a step. Bytes are what each rank sends in ring algorithms."""
_BY_RANK = " a|b: what the ranks hold, where it differs."
_TAIL = " T(n): each rank has the last n entries of the sequence."
_WHOLE_SEQUENCES = """\
Calls with a sequence that {size} ranks can't share evenly run by a second program, compiled at the first such call \
from the same plan with all sequences whole."""
FREEDOMS = {
    "slice_constants": "values without a gradient are sliced at boundaries, too",
    "features": "new tensors with as many entries as there are features are split",
    "heads": "dims with as many entries as there are heads are split at boundaries",
    "slices": "operations take parts of whole values",
    "lengths_as_heads": "dims that are as long as the example are taken for heads, where there are as many",
    "once": "values whose gradient is a sum over the ranks become whole at boundaries",
    "unread": "layers are placed whose results nobody reads",
    "reducing": "bodies reduce split classes by collectives",
    "moves": "operands are resharded inside of bodies",
    "moving": "operands are resharded inside of bodies",
    "bases": "what stands beside the layer that a module wraps is whole",
}
_INTERLEAVED = " S(d, interleave=b): split along the sequence, which is flattened into dim d with a batch of b."


def render_program(
    program: Program,
    *,
    width: int = 100,
    color: bool = False,
    where_it_pays: Callable[[KernelUse], str] = lambda use: "where it pays",
) -> str:
    """The program as text of `width` columns: its cost, its communication, its modules, and findings.

    `where_it_pays` says from which size on a kernel is taken on this machine.
    """
    kernels = kernel_table(program, where_it_pays)
    parts = [_headline(program), *_tables(program, width), *([] if kernels is None else [kernels]), *_notes(program)]
    text = to_text(parts, width, color)
    findings = render_findings(program.diagnostics, color=color)
    return f"{text}\n\n{findings}" if findings else text


def to_text(parts: Iterable[RenderableType], width: int, color: bool) -> str:
    """Renderables as text, an empty line between them; without escape codes and trailing blanks unless coloured."""
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


def _tables(program: Program, width: int) -> Iterator[RenderableType]:
    yield cost_table(program)
    yield memory_table(program)
    yield communication_table(program, collapse(units(program)), width)
    yield module_table(collapse(without_boundaries(units(program))), program.size, width)


def legend(program: Program) -> Text:
    """What the signs mean."""
    more = (_BY_RANK if program.is_uneven else "") + (_INTERLEAVED if program.flattens_batch else "")
    more += _TAIL if any(reshard.target.tail for _, reshard in program.reshards()) else ""
    return Text(_LEGEND + more, style="dim")


def _notes(program: Program) -> Iterator[RenderableType]:
    yield legend(program)
    if program.sequence_lengths:
        yield Text(_WHOLE_SEQUENCES.format(size=program.size))
    yield from _summed(program)
    if program.freedoms:
        allowed = dict.fromkeys(FREEDOMS[name] for name in program.freedoms)
        yield listed("Allowed, as the plan would gather more, or not compile, without:", allowed)
    yield from _overlapped(program)
    yield from _assumptions(program)


def _headline(program: Program) -> Text:
    inputs = ", ".join(f"{path_text(i.path)} {shape_text(i.shape)} {i.dtype}" for i in program.inputs)
    text = Text(f"{program.model} with plan {program.plan} on {count_text(program.size, 'rank')}", style="bold")
    mode = "training" if program.training else "evaluation"
    return text.append(f" (axis {program.axis}), in {mode}\ncalled with {inputs}", style="not bold")


def _overlapped(program: Program) -> Iterator[Text]:
    """What runs beside matrix products, equal layers together, and what doesn't."""
    if not program.overlaps:
        return
    counted = Counter(_overlap_text(o, program.overlapped(o)[1].gathered_again) for o in program.overlaps)
    yield listed("Run beside matrix products:", [text if n == 1 else f"{text} × {n}" for text, n in counted.items()])
    places = {(overlap.module, overlap.path) for overlap in program.overlaps if overlap.units}
    others = Counter(
        str(way)
        for module, reshard in program.reshards()
        if (module.name, reshard.path) not in places
        for way in {reshard.forward, reshard.backward}
        if way.communicates
    )
    if others:
        yield listed(
            "Exposed, as no linear layer stands there, or the plan asks for nothing:",
            [f"{name} at {count_text(count, 'place')}" for name, count in sorted(others.items())],
        )


def _overlap_text(overlap: Overlap, again: bool) -> str:
    layers = ", ".join(name.rpartition(".")[2] for name in overlap.linears)
    place = ".".join(filter(None, (_INDEX.sub("*", overlap.module), *map(str, overlap.path))))
    text = f"{', '.join(overlap.units) or 'nothing'} at {place or 'the model'}: {layers}"
    if overlap.groups and overlap.units:
        text += f"; parts multiplied {', '.join(map(str, overlap.groups))} at a time"
    if overlap.least:
        text += f"; from {overlap.least:,} rows on"
    return f"{text}; gathered again in the backward" if again else text


def _summed(program: Program) -> Iterator[Text]:
    """The parameters whose gradients are summed over the ranks, layers together."""
    counted = Counter(_INDEX.sub("*", parameter.name) for parameter in program.summed_parameters)
    if counted:
        names = [name if count == 1 else f"{name} × {count}" for name, count in counted.items()]
        yield listed("Gradients summed over the ranks, all together once a step:", names)


def _assumptions(program: Program) -> Iterator[Text]:
    """Branches on data: the proof follows the way that the example took."""
    if program.assumptions:
        counted = Counter(program.assumptions)
        places = [place if count == 1 else f"{place} (× {count})" for place, count in counted.items()]
        yield listed("Assumed to go the same way on every call, since they depend on data:", places)
    if program.assumed:
        yield listed("Assumed of operators, as it couldn't be tried:", program.assumed)
    if program.count_collectives() != program.count_collectives(picked=False):
        title = "Called for some data only, and with them the collectives inside:"
        counted = Counter(_INDEX.sub("*", name) for name in program.picked)
        yield listed(title, [name if count == 1 else f"{name} × {count}" for name, count in counted.items()])


def listed(title: str, entries: Iterable[str]) -> Text:
    """A title, and its entries below."""
    return Text("\n").join([Text(title, style="bold"), *(Text(f"  {entry}") for entry in entries)])

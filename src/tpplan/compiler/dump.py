"""Dump: what each pass made, as text files to read and to diff, where `TPPLAN_DUMP` names a folder."""

from __future__ import annotations

import os
from pathlib import Path

from tpplan.compiler.bind.bind import Binding
from tpplan.compiler.ir.program import Program
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.compiler.place.assign import Assignment


class Dump:
    """Writes numbered files into a folder; does nothing without one."""

    def __init__(self, folder: Path | None) -> None:
        """Write into `folder`, which is made if need be."""
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def from_environment(cls) -> Dump:
        """As `TPPLAN_DUMP` says."""
        named = os.environ.get("TPPLAN_DUMP")
        return cls(Path(named) if named else None)

    def _write(self, name: str, lines: list[str]) -> None:
        if self._folder is not None:
            (self._folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def binding(self, binding: Binding) -> None:
        """01: style by module, layout by parameter."""
        if self._folder is not None:
            lines = [f"{name}: {bound.style}  # {bound.rule.origin}" for name, bound in binding.modules.items()]
            self._write("01-bind.txt", [*lines, "", *(f"{n}: {held}" for n, held in binding.parameters.items())])

    def trace(self, trace: Trace) -> None:
        """02: the trace, as an indented tree."""
        if self._folder is not None:
            self._write("02-capture.txt", _tree(trace, trace.root, None, 0))
            self._last = trace

    def assignment(self, assignment: Assignment, attempt: int) -> None:
        """03: the trace with layouts and reshards; a file for each attempt."""
        if self._folder is not None:
            self._write(f"03-place-{attempt:02}.txt", _tree(self._last, self._last.root, assignment, 0))

    def program(self, program: Program) -> None:
        """04: the program."""
        if self._folder is not None:
            self._write("04-program.json", [program.to_json()])


def _tree(trace: Trace, frame: Frame, assignment: Assignment | None, depth: int) -> list[str]:
    def show(value: int) -> str:
        held = trace.values[value]
        name = trace.parameters[value][0] if value in trace.parameters else f"%{value}"
        layout = f": {assignment.layouts[value]}" if assignment is not None and value in assignment.layouts else ""
        return f"{name}{list(held.shape)}{layout}"

    pad = "  " * depth
    lines = [f"{pad}{frame.module or '<model>'}#{frame.call}"]
    for crossing in frame.entries:
        lines.append(f"{pad}  {'.'.join(map(str, crossing.path))}: {show(crossing.source)} -> {show(crossing.target)}")
    for node in frame.body:
        if isinstance(node, Operation):
            made = ", ".join(show(o) for o in node.outputs if o is not None)
            read = ", ".join(show(i) for i in node.inputs)
            lines.append(f"{pad}  {made} = {node.name}({read})")
        else:
            lines += _tree(trace, node, assignment, depth + 1)
    for crossing in frame.exits:
        path = ".".join(map(str, crossing.path)) or "result"
        lines.append(f"{pad}  return {path}: {show(crossing.source)} -> {show(crossing.target)}")
    return lines

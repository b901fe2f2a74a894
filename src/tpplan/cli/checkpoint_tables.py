"""A checkpoint's tensors as tables for people, and as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from io import StringIO

from rich.console import Console

from tpplan.checkpoint.assembled import Source
from tpplan.checkpoint.stored import Checkpoint
from tpplan.report.grid import natural_width, new_table
from tpplan.report.quantities import NOTHING, bytes_text, count_text, shape_text

Shares = Mapping[str, Sequence[int]]
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def as_json(checkpoint: Checkpoint, shares: Shares) -> str:
    """Every tensor, and what each rank reads of it where that is known."""
    tensors = {
        name: {"dtype": held.dtype, "shape": held.shape, "bytes": held.nbytes, "file": held.path.name}
        | ({"bytes_by_rank": shares[name]} if name in shares else {})
        for name, held in checkpoint.tensors.items()
    }
    return json.dumps({"path": str(checkpoint.path), "files": checkpoint.files, "tensors": tensors}, indent=2)


def as_text(checkpoint: Checkpoint, shares: Shares, size: int) -> str:
    """A table of the tensors, those of equal layers once, with totals.

    Args:
        checkpoint: the checkpoint.
        shares: for tensors by name, the bytes that each rank reads.
        size: the number of ranks; 0 without a plan.
    """
    groups: dict[tuple[str, str, tuple[int, ...], tuple[int, ...] | None], list[Source]] = {}
    for name, held in checkpoint.tensors.items():
        key = _NUMBER.sub("*", name), held.dtype, held.shape, tuple(shares[name]) if name in shares else None
        groups.setdefault(key, []).append(held)
    heads = ["tensor", "dtype", "shape", "size", *(["a rank"] if size else [])]
    table = new_table(*heads, right=(3, 4))
    for (name, dtype, shape, share), several in groups.items():
        label = f"{name} × {len(several)}" if len(several) > 1 else several[0].name
        row = [label, dtype, shape_text(shape), bytes_text(sum(held.nbytes for held in several))]
        if size:
            row.append(NOTHING if share is None else bytes_text(max(share) * len(several)))
        table.add_row(*row)
    text = StringIO()
    Console(file=text, width=natural_width(table), color_system=None).print(table)
    rows = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    return "\n".join([rows, "", *_totals(checkpoint, shares, size)])


def _totals(checkpoint: Checkpoint, shares: Shares, size: int) -> list[str]:
    held = checkpoint.tensors.values()
    sizes, counts = Counter[str](), Counter[str]()
    for tensor in held:
        sizes[tensor.dtype] += tensor.nbytes
        counts[tensor.dtype] += 1
    total = sum(sizes.values())
    lines = [
        f"{count_text(len(checkpoint.tensors), 'tensor')} in {count_text(len(checkpoint.files), 'file')}, "
        f"{bytes_text(total)}: " + ", ".join(f"{counts[d]:,} {d} of {bytes_text(n)}" for d, n in sizes.most_common())
    ]
    if size:
        by_rank = [sum(share[rank] for share in shares.values()) for rank in range(size)]
        read = sum(tensor.nbytes for name, tensor in checkpoint.tensors.items() if name in shares)
        each = bytes_text(max(by_rank)) if len(set(by_rank)) == 1 else ", ".join(map(bytes_text, by_rank))
        lines.append(f"Each of {size} ranks reads {each} of {bytes_text(read)}.")
        if len(shares) < len(checkpoint.tensors):
            others = len(checkpoint.tensors) - len(shares)
            lines.append(f"{count_text(others, 'tensor')} ({NOTHING}) aren't the model's, and are read by no rank.")
    return lines

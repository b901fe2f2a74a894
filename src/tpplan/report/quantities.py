"""Sizes, shapes and places as people read them."""

from __future__ import annotations

from collections.abc import Iterable

NOTHING = "–"
_ASCII = str.maketrans("→─×–−·∂…µ", ">-x--.d~u")
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: int) -> str:
    """`512 B`, `28.0 MiB`; binary units."""
    value, unit = float(count), "B"
    for larger in _UNITS:
        if value < 1023.95:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:,.1f} {unit}"


def shape_text(shape: Iterable[int]) -> str:
    """`(3, 32, 64)`; a vector is `(64)` and a scalar `()`."""
    return f"({', '.join(map(str, shape))})"


def count_text(count: int, thing: str) -> str:
    """`1 parameter`, `9 parameters`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def path_text(path: Iterable[str | int]) -> str:
    """Where a tensor sits in arguments or results: `hidden_states`, `position_embeddings.0`; `result` if it's all."""
    return ".".join(map(str, path)) or "result"


def encodable(text: str, encoding: str | None) -> str:
    """`text`, with ASCII letters of the same width for its signs if `encoding` lacks them."""
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(_ASCII)
    return text

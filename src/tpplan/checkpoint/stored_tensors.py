"""What a checkpoint of a model holds: the stock model's tensors, in files, with all that their headers say.

in:  a model
out: entries in the order of its state_dict, tied tensors once; files of them
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpplan.checkpoint.files import problem
from tpplan.checkpoint.header import CODES
from tpplan.runtime.parameters.sharded_tensors import ShardedTensor
from tpplan.runtime.parameters.taken_apart import by_parts


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        name: its first name in the state_dict.
        tensor: as the model has it: whole, or a DTensor.
    """

    name: str
    tensor: Tensor

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize

    def described(self, offset: int) -> dict[str, Any]:
        """What the header says of it, whose bytes begin at `offset`."""
        shape = list(self.tensor.shape)
        if self.tensor.dtype is torch.float4_e2m1fn_x2:
            shape[-1] *= 2  # an element of torch's is two
        return {
            "dtype": CODES[self.tensor.dtype],
            "shape": shape,
            "data_offsets": [offset, offset + self.bytes],
        }


@dataclass(frozen=True, slots=True)
class File:
    """The tensors of one file, in its order: wide dtypes first, so that each lies at a multiple of its width."""

    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(entry.bytes for entry in self.entries)

    def header(self) -> bytes:
        """All that comes before the numbers."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in self.entries:
            table[entry.name] = entry.described(offset)
            offset += entry.bytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def entries_of(model: nn.Module) -> list[Entry]:
    """The state_dict's tensors, tied ones once, under their first name.

    Raises:
        CheckpointError: TP121, for what has no numbers, or can't be in a safetensors file.
    """
    distinct: dict[int, Entry] = {}
    for name, value in by_parts(model.state_dict(keep_vars=True)):
        if id(value) not in distinct:
            distinct[id(value)] = entry = Entry(name, ShardedTensor.adopted(value))
            _refuse_unstorable(entry)
    entries = list(distinct.values())
    missing = [entry.name for entry in entries if entry.tensor.is_meta]
    if missing:
        raise problem(
            f"`{missing[0]}` and {len(missing) - 1} more have no numbers yet", "load or initialise them first"
        )
    return entries


def _refuse_unstorable(entry: Entry) -> None:
    value: Any = entry.tensor
    way_out = "save such a model with torch.save(model.state_dict(), …)"
    if not isinstance(value, Tensor):
        raise problem(f"`{entry.name}` is no tensor but a {type(value).__name__}", way_out)
    if value.layout is not torch.strided or value.dtype not in CODES:
        kind = value.dtype if value.layout is torch.strided else value.layout
        raise problem(f"`{entry.name}` is {kind}, which safetensors has no word for", way_out)


def in_files(entries: Sequence[Entry], file_bytes: int) -> list[File]:
    """The entries in files, each of `file_bytes` at most, or of one tensor."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.bytes
    return [File(tuple(sorted(held, key=lambda entry: -entry.tensor.dtype.itemsize))) for held in files]


__all__ = ["CODES", "Entry", "File", "entries_of", "in_files"]

"""The text that the tutorials train on: the language reference that every Python carries, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

VOCABULARY = 256


def corpus() -> Tensor:
    """Some 700 kB of English and code, as one tensor of byte numbers."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def batches(text: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches (batch, length) of stretches of the text; the same ones wherever the seed is the same.

    Ranks that share a model must see the same batches: give them one seed. Ranks of a data-parallel axis must not.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (batch,), generator=generator)
        yield torch.stack([text[start : start + length] for start in starts.tolist()])

"""Numbers that are packed into fewer bytes and taken out again are known for what went in, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.trace import Frame, Operation
from tpplan.compiler.trace.copied import with_copies
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.tape import OpenFrame


def source_of(run: Callable[[Tensor], tuple[Tensor, Tensor]], *shape: int) -> bool:
    """Whether the second of what `run` makes of a tensor is known as a copy of the first."""
    recorder = Recorder(CaptureSettings(training=False))
    recorder.frames.append(OpenFrame("", 0, []))
    with recorder:
        numbers, result = run(torch.empty(shape, device="meta"))
    source, made = recorder.value_of(numbers), recorder.value_of(result)
    body = tuple(recorder.frames[0].body)
    frame = with_copies(Frame("", 0, (), (), body), recorder.values, {(made,)}, set())
    (last,) = [node for node in frame.body if isinstance(node, Operation) and node.outputs == (made,)]
    return last.name == "aten.alias.default" and last.inputs == (source,)


def small(x: Tensor, most: int = 15) -> Tensor:
    return x.round().clamp(0, most).to(torch.uint8)


def packed(x: Tensor, bits: int) -> Tensor:
    """By rows: the first of each part lie in the lowest bits."""
    times = 8 // bits
    rows = -(-len(x) // times)
    found = torch.zeros(rows, *x.shape[1:], dtype=torch.uint8, device=x.device)
    for i in range(times):
        part = x[i * rows : (i + 1) * rows]
        found[: len(part)] |= part << bits * i
    return found


def unpacked(x: Tensor, bits: int, rows: int) -> Tensor:
    parts = [(x & (2 ** (bits * (i + 1)) - 1)) >> bits * i for i in range(8 // bits)]
    return torch.cat(parts)[:rows]


def by_rows(bits: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        numbers = small(x, 2**bits - 1)
        return numbers, unpacked(packed(numbers, bits), bits, len(x))

    return run


def side_by_side(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = small(x)
    both = numbers[:, ::2] | numbers[:, 1::2] << 4
    return numbers, torch.stack([both & 15, both >> 4], 2).view(x.shape)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("bits", [2, 4])
def test_what_is_unpacked_is_what_was_packed(bits: int, rows: int) -> None:
    assert source_of(by_rows(bits), rows, 3)


def test_packing_by_neighbours_is_followed() -> None:
    assert source_of(side_by_side, 3, 4)


def unbounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of more bits than there is room for."""
    numbers = small(x, 255)
    return numbers, unpacked(packed(numbers, 4), 4, len(x))


def exchanged(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = small(x)
    held = packed(numbers, 4)
    return numbers, torch.cat([held >> 4, held & 15])


def shifted(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = small(x)
    return numbers, unpacked(packed(numbers, 4) << 1, 4, len(x))


def with_another_bit(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = small(x)
    held = packed(numbers, 4)
    held |= 1 << torch.zeros_like(held)
    return numbers, unpacked(held, 4, len(x))


def written_over(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = small(x)
    held = packed(numbers, 4)
    held[:1] = small(x * 2)[:1]
    return numbers, unpacked(held, 4, len(x))


def flipped(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = small(x)
    return numbers, numbers.flip(0)


@pytest.mark.parametrize("run", [unbounded, exchanged, shifted, with_another_bit, written_over, flipped])
def test_what_isn_t_a_copy_isn_t_taken_for_one(run: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    assert not source_of(run, 4, 3)

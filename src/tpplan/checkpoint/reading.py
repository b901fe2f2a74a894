"""Reading: byte ranges of files, counted, into tensors; nothing larger than a chunk is held besides the tensor."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor

from tpplan.checkpoint.distributed import read_chunk
from tpplan.checkpoint.header import Stored, StoredChunk
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.ranges import run_length, runs, shared
from tpplan.runtime.parameters.pieces import Box, narrowed

CHUNK = 4 * 1024**2
SHORT = 32 * 1024
"""Runs of fewer bytes are copied out of a mapped file, as a call of the system for each would take longer."""


class Files:
    """Files that stay open for as long as tensors are read from them."""

    def __init__(self, meter: Meter) -> None:
        """Count what is read in `meter`."""
        self._meter = meter
        self._lock = threading.Lock()
        self._own = threading.local()
        self._opened = contextlib.ExitStack()
        self._descriptors: dict[Path, int] = {}
        self._mapped: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.clear()  # tensors that look into a map keep it; it goes with them
        self._opened.close()

    def expect(self, reads: Iterable[tuple[Stored, Iterable[Box]]]) -> None:
        """Have the system read what `fill_by` will ask for, so that the disk is busy while numbers are copied."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):  # reading tells what is wrong
            for stored, boxes in reads:
                descriptor = self._descriptor(stored.path)
                for begin, count in _stretches(boxes, stored):
                    os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_WILLNEED)

    def fill(self, part: Tensor, boxes: Iterable[Box], stored: Stored) -> bool:
        """Read a rank's boxes of a tensor into its part, cast to the part's dtype.

        Args:
            part: a plain tensor, on any device.
            boxes: what it holds of the whole.
            stored: where that lies.

        Returns:
            Whether all numbers are finite, as cast.

        Raises:
            OSError: the file can't be read, or has become shorter.
        """
        return self.fill_by(part, [(stored, tuple(boxes))])

    def fill_by(self, part: Tensor, reads: Iterable[tuple[Stored, Iterable[Box]]]) -> bool:
        """As `fill`, with boxes of several tensors."""
        here = part.device.type == "cpu"
        finite = all([self._filled(part, boxes, stored, here) for stored, boxes in reads])
        return finite if here else all_finite(part)

    def _filled(self, part: Tensor, boxes: Iterable[Box], stored: Stored, here: bool) -> bool:
        if stored.chunks:
            return self._fill_from_chunks(part, [*boxes], stored.chunks, here)
        path, shape, dtype = stored.path, stored.shape, stored.torch_dtype
        assert dtype is not None, stored
        finite = True
        for box in boxes:
            target = box.of_part(part)
            if box.sizes == shape or run_length(box, shape) * dtype.itemsize >= SHORT:
                for first, index in runs(box, shape):
                    finite &= self._run(target[index], path, stored.start + first * dtype.itemsize, dtype, here)
            else:
                whole = torch.frombuffer(self._map(path), dtype=dtype, count=math.prod(shape), offset=stored.start)
                finite &= self._copy(target, box.of_whole(whole.view(shape)), here)
        return finite

    def _fill_from_chunks(self, part: Tensor, boxes: Sequence[Box], chunks: Iterable[StoredChunk], here: bool) -> bool:
        """Copy what the boxes share with each chunk; those that share nothing aren't read."""
        finite = True
        for chunk in chunks:
            met = [(box, start, sizes) for box in boxes if (meet := shared(box, chunk)) for start, sizes in [meet]]
            numbers = read_chunk(chunk, self._meter) if met else None
            for box, start, sizes in met:
                assert numbers is not None
                place = tuple(p + s - b for p, s, b in zip(box.place, start, box.start, strict=True))
                inside = tuple(s - o for s, o in zip(start, chunk.offsets, strict=True))
                target = narrowed(part, place, sizes)
                target.copy_(narrowed(numbers, inside, sizes))
                finite &= not here or all_finite(target)
        return finite

    def _run(self, target: Tensor, path: Path, begin: int, dtype: torch.dtype, here: bool) -> bool:
        """Read what is one stretch in the file."""
        if not target.is_contiguous():
            read = torch.empty(target.shape, dtype=dtype)
            self._run(read, path, begin, dtype, here=False)
            target.copy_(read)
            return not here or all_finite(target)
        finite, flat, step = True, target.view(-1), CHUNK // dtype.itemsize
        direct = target.device.type == "cpu" and target.dtype == dtype
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step]
            if direct:
                self._read(path, begin + first * dtype.itemsize, piece)
            else:
                read = self._staging().view(dtype)[: piece.numel()]
                self._read(path, begin + first * dtype.itemsize, read)
                piece.copy_(read)
            finite &= not here or all_finite(piece)
        return finite

    def _copy(self, target: Tensor, source: Tensor, here: bool) -> bool:
        """Copy what is many short stretches in a mapped file."""
        finite = True
        dim = next((dim for dim, count in enumerate(target.shape) if count > 1), 0)
        row = target.numel() // target.shape[dim] * source.itemsize
        step = max(CHUNK // row, 1)
        for first in range(0, target.shape[dim], step):
            count = min(step, target.shape[dim] - first)
            piece, read = target.narrow(dim, first, count), source.narrow(dim, first, count)
            piece.copy_(read if here else read.contiguous())
            self._meter.add(read.numel() * read.itemsize)
            finite &= not here or all_finite(piece)
        return finite

    def _read(self, path: Path, begin: int, target: Tensor) -> None:
        descriptor = self._descriptor(path)
        count = target.numel() * target.itemsize
        memory = memoryview((ctypes.c_char * count).from_address(target.data_ptr())).cast("B")
        done = 0
        while done < count:
            read = os.preadv(descriptor, [memory[done:]], begin + done)
            if not read:
                raise OSError(errno.EIO, "it has become shorter while it was read", str(path))
            done += read
        self._meter.add(count)

    def _staging(self) -> Tensor:
        """This thread's memory for a chunk on its way to another dtype or device."""
        held = getattr(self._own, "staging", None)
        if held is None:
            held = self._own.staging = torch.empty(CHUNK, dtype=torch.uint8)
        return cast("Tensor", held)

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                self._opened.callback(os.close, self._descriptors[path])
            return self._descriptors[path]

    def _map(self, path: Path) -> mmap.mmap:
        descriptor = self._descriptor(path)
        with self._lock:
            if path not in self._mapped:
                # torch takes no memory that may not be written, so it may: a page that was would be private.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                self._mapped[path] = mmap.mmap(descriptor, 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            return self._mapped[path]


def _stretches(boxes: Iterable[Box], stored: Stored) -> Iterator[tuple[int, int]]:
    """The bytes of a file that boxes are in; short stretches with all that is between them; of chunks, nothing."""
    dtype = stored.torch_dtype
    assert dtype is not None, stored
    for box in () if stored.chunks else boxes:
        count = run_length(box, stored.shape) * dtype.itemsize
        if SHORT <= count < stored.bytes:
            yield from ((stored.start + first * dtype.itemsize, count) for first, _ in runs(box, stored.shape))
        elif count:
            yield stored.start, stored.bytes


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; a sum tells, unless it has grown too large itself."""
    if tensor.itemsize == 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


__all__ = ["Files", "all_finite"]

"""Reading: byte ranges of files, counted, into tensors; nothing larger than a chunk is held besides the tensor.

Short stretches are taken from safetensors' slices. Long ones are read by hand: no library reads into memory that is
there already, and what a mapped file no longer has when it is looked at ends the process (SIGBUS), where a read fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpplan.checkpoint.dequantised import Dequantised, Readable, raw
from tpplan.checkpoint.distributed import read_chunk
from tpplan.checkpoint.header import Stored
from tpplan.checkpoint.meter import Meter
from tpplan.checkpoint.ranges import run_length, runs
from tpplan.runtime.parameters.pieces import Box

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
        self._mapped_files: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped_files.clear()  # tensors that look into a map keep it; it goes with them
        self._opened.close()

    def expect(self, reads: Iterable[tuple[Readable, Sequence[Box]]]) -> None:
        """Have the system read what `fill_by` will ask for, so that the disk is busy while numbers are copied."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):  # reading tells what is wrong
            for stored, boxes in raw(reads):
                descriptor = self._descriptor(stored.path)
                for begin, count in _stretches(boxes, stored):
                    os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_WILLNEED)

    def fill(self, part: Tensor, boxes: Iterable[Box], stored: Readable) -> bool:
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

    def fill_by(self, part: Tensor, reads: Iterable[tuple[Readable, Sequence[Box]]]) -> bool:
        """As `fill`, with boxes of several tensors."""
        here = part.device.type == "cpu"
        finite = all([self._filled(part, boxes, stored, here) for stored, boxes in reads])
        return finite if here else all_finite(part)

    def _filled(self, part: Tensor, boxes: Sequence[Box], stored: Readable, here: bool) -> bool:
        finite = True
        if isinstance(stored, Dequantised):
            for box in boxes:
                for piece in stored.fill(box.of_part(part), box, self._box, CHUNK // 4):
                    finite &= not here or all_finite(piece)
            return finite
        whole = read_chunk(stored, self._meter) if stored.pickled else None
        for box in boxes:
            target = box.of_part(part)
            if whole is not None:
                finite &= self._copy(target, box.of_whole(whole), here)
            elif box.sizes == stored.shape or run_length(box, stored.shape) * _width(stored) >= SHORT:
                for first, index in runs(box, stored.shape):
                    finite &= self._run(target[index], stored, first, here)
            else:
                self._meter.add(target.numel() * _width(stored))
                finite &= self._copy(target, box.of_whole(self._mapped(stored)), here)
        return finite

    def _box(self, stored: Stored, box: Box) -> Tensor:
        """A box of a tensor by itself, as it is stored."""
        held = torch.empty(box.sizes, dtype=stored.torch_dtype, device="cpu")
        self._filled(held, (box._replace(place=(0,) * len(box.sizes)),), stored, here=False)
        return held

    def _run(self, target: Tensor, stored: Stored, first: int, here: bool) -> bool:
        """Read what is one stretch in the file, from element `first` of the stored tensor on."""
        dtype, width = stored.torch_dtype, _width(stored)
        assert dtype is not None, stored
        if not target.is_contiguous():
            read = torch.empty(target.shape, dtype=dtype)
            self._run(read, stored, first, here=False)
            target.copy_(read)
            return not here or all_finite(target)
        finite, flat, begin = True, target.view(-1), stored.start + first * width
        direct = target.device.type == "cpu" and target.dtype == dtype
        for piece in torch.split(flat, max(CHUNK // width, 1)):
            read = piece if direct else self._staging().view(dtype)[: piece.numel()]
            self._read(stored.path, begin, read)
            begin += read.nbytes
            if not direct:
                piece.copy_(read)
            finite &= not here or all_finite(piece)
        return finite

    def _copy(self, target: Tensor, source: Tensor, here: bool) -> bool:
        """Copy numbers of a mapped file, or of one that was read whole."""
        finite = True
        target, source = target[None], source[None]
        dim = next((dim for dim, count in enumerate(target.shape) if count > 1), 0)
        step = max(CHUNK * target.shape[dim] // source.nbytes, 1)
        for piece, read in zip(torch.split(target, step, dim), torch.split(source, step, dim), strict=True):
            piece.copy_(read if here else read.contiguous())
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

    def _mapped(self, stored: Stored) -> Tensor:
        """A stored tensor in the mapped file, of which nothing is read until it is looked at."""
        with self._lock:
            if stored.path not in self._mapped_files:
                try:
                    self._mapped_files[stored.path] = self._opened.enter_context(safe_open(stored.path, "pt"))
                except SafetensorError as error:
                    raise OSError(errno.EIO, str(error), str(stored.path)) from None
            numbers: Tensor = self._mapped_files[stored.path].get_slice(stored.name)[:]
        return numbers.view(stored.shape)


def _width(stored: Stored) -> int:
    return stored.bytes_of(1)


def _stretches(boxes: Iterable[Box], stored: Stored) -> Iterator[tuple[int, int]]:
    """The bytes of a file that boxes are in; short stretches with all that is between them; of pickles, nothing."""
    for box in () if stored.pickled else boxes:
        width = _width(stored)
        count = run_length(box, stored.shape) * width
        if SHORT <= count < stored.bytes:
            yield from ((stored.start + first * width, count) for first, _ in runs(box, stored.shape))
        elif count:
            yield stored.start, stored.bytes


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; a sum tells, unless it has grown too large itself."""
    if tensor.itemsize == 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


__all__ = ["Files", "all_finite"]

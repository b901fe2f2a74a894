"""Writers: safetensors files, tensor by tensor.

Names, shapes and dtypes are known beforehand, so the header is written first, and the numbers follow as they come.
safetensors' own writer needs all numbers of a file in memory at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpplan.checkpoint.stored_tensors import File


class FileWriter:
    """Writes the numbers of some files, in the order of their entries.

    After an error it takes what comes without writing it, so that the ranks that send it aren't left waiting;
    `finish` raises the error.
    """

    def __init__(self, files: Sequence[tuple[Path, File]], tell: Callable[[int, int], None]) -> None:
        """Write these files, whose numbers come file by file; `tell` hears how many bytes of how many."""
        self._tell = tell
        self._written, self._all = 0, sum(file.bytes for _, file in files)
        self._waiting = list(files)
        self._descriptor: int | None = None
        self._left = 0
        self._error: OSError | None = None

    def write(self, block: Tensor) -> None:
        """Write the next block: contiguous, of integers as wide as the dtype, in main memory."""
        try:
            while self._error is None and not self._left:
                self._next_file()
            if self._error is None and self._descriptor is not None:
                write_all(self._descriptor, _bytes_of(block))
                self._left -= block.nbytes
                self._written += block.nbytes
                self._tell(self._written, self._all)
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Close the last file, and make those that have no numbers.

        Raises:
            OSError: something couldn't be written.
        """
        try:
            while self._error is None and self._waiting:
                self._next_file()
            if self._error is None:
                self._close()
        except OSError as error:
            self._error = error
        if self._error is not None:
            self.abandon()
            raise self._error

    def abandon(self) -> None:
        """Let go of the open file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _next_file(self) -> None:
        self._close()
        path, file = self._waiting.pop(0)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        write_all(self._descriptor, file.header())
        self._left = file.bytes

    def _close(self) -> None:
        if self._descriptor is not None:
            assert not self._left
            os.fsync(self._descriptor)
            self.abandon()


def write_all(descriptor: int, content: Any) -> None:
    """Write all of it, in as many calls as that takes."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, down to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return  # a folder, on Windows
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems that can't for folders
            raise
    finally:
        os.close(descriptor)


def _bytes_of(block: Tensor) -> Any:
    return block.reshape(-1).view(torch.uint8).numpy().data


__all__ = ["FileWriter", "sync", "write_all", "write_file"]

"""A count of the bytes that are read from files, for benchmarks and tests."""

from __future__ import annotations

import threading


class Meter:
    """Counts the bytes that are read from files, by any thread; of mapped ones, those that are copied."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count that many more."""
        with self._lock:
            self.bytes += count


__all__ = ["Meter"]

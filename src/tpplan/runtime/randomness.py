"""Random numbers over an axis: the same on every rank where values are replicated, different where they are split.

Replicated values draw from torch's default generators, which the user seeds alike on all ranks. Around a body that
draws for split values, the generator is seeded with a draw of the replicated stream plus the rank, and put back
afterwards. Nothing is remembered between calls, so one seed reproduces the run, and a recomputed forward (activation
checkpointing restores the default generators) draws the same numbers again.
"""

from __future__ import annotations

from types import TracebackType

import torch

from tpplan.runtime.communicator import Communicator

_RANK_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: far apart for neighbouring ranks


class SplitRandomness:
    """A context in which the device's default generator draws this rank's own numbers."""

    def __init__(self, axis: Communicator, device: torch.device) -> None:
        """Split the stream of `device` over `axis`."""
        self._axis = axis
        self._device = device
        self._shared: list[torch.Tensor] = []

    def __enter__(self) -> None:
        """Seed the generator for this rank."""
        drawn = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu").item())
        seed = (drawn + _RANK_STRIDE * (self._axis.rank + 1)) % (1 << 63)
        if self._device.type == "cuda":
            self._shared.append(torch.cuda.get_rng_state(self._device))
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        else:
            self._shared.append(torch.get_rng_state())
            torch.default_generator.manual_seed(seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the replicated stream back."""
        shared = self._shared.pop()
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(shared, self._device)
        else:
            torch.set_rng_state(shared)

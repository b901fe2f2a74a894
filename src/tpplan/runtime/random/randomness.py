"""Random numbers over an axis: the same on every rank where values are replicated, different where they are split.

Replicated values draw from torch's default generators, which the user seeds alike on all ranks. Around a body that
draws for split values, the generator is seeded with a draw of the replicated stream plus the rank, and put back
afterwards. Nothing is remembered between calls, so one seed reproduces the run, and a recomputed forward (activation
checkpointing restores the default generators) draws the same numbers again.
"""

from __future__ import annotations

import inspect
from types import FrameType, TracebackType

import torch
from torch.utils import checkpoint

from tpplan.compat.generators import GENERATOR, random_state, set_random_state
from tpplan.plan import TpplanError
from tpplan.runtime.ranks.communicator import Communicator

_RANK_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: far apart for neighbouring ranks


class RandomnessError(TpplanError):
    """It can't be said which of a body's random numbers are for sharded values."""


class SplitRandomness:
    """A context in which the device's default generator draws this rank's own numbers."""

    def __init__(self, axis: Communicator, device: torch.device) -> None:
        """Split the stream of `device` over `axis`."""
        self._axis = axis
        self._device = device
        self._shared: list[torch.Tensor] = []
        self._frames: list[FrameType | None] = []

    def __enter__(self) -> None:
        """Seed the generator for this rank."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_name == "__enter__":  # of what this context is a part of
            frame = frame.f_back
        self._frames.append(frame)
        if self._device.type == "meta":  # no numbers are drawn
            self._shared.append(_state_of(self._device))
            return
        # The generator is named, so that who follows what a model draws can tell this draw from the model's own.
        shared = torch.default_generator
        with GENERATOR:
            drawn = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu", generator=shared).item())
        seed = (drawn + _RANK_STRIDE * (self._axis.rank + 1)) % (1 << 63)
        self._shared.append(_state_of(self._device))
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        else:
            with GENERATOR:
                shared.manual_seed(seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the replicated stream back."""
        self._frames.pop()
        _restore(self._device, self._shared.pop())

    def replicated(self) -> ReplicatedRandomness:
        """A context for modules that draw for replicated values, wherever they are called."""
        return ReplicatedRandomness(self._device, self._shared, self._frames)


class ReplicatedRandomness:
    """A context in which the generator draws the replicated stream's numbers, also inside of a split one."""

    def __init__(self, device: torch.device, shared: list[torch.Tensor], frames: list[FrameType | None]) -> None:
        """Take turns with the split contexts that put the replicated stream aside in `shared`, begun in `frames`."""
        self._frames = frames
        self._device = device
        self._shared = shared
        self._split: list[torch.Tensor | None] = []

    def is_aside(self) -> bool:
        """Whether another stream is drawn from around it."""
        return bool(self._shared)

    def __enter__(self) -> None:
        """Bring the replicated stream back, if it was put aside."""
        if not self._shared:
            self._split.append(None)
            return
        if is_checkpointed(self._frames[0]):
            raise RandomnessError.of(
                "TP119",
                "a body draws random numbers for sharded values, and checkpoints a part of itself in which a module "
                "draws for replicated values, which would draw different numbers when it is recomputed",
                help="put the activation checkpoint around the whole module",
            )
        self._split.append(_state_of(self._device))
        _restore(self._device, self._shared[0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Go on where the split stream was."""
        split = self._split.pop()
        if split is not None:
            self._shared[0] = _state_of(self._device)
            _restore(self._device, split)


def is_checkpointed(outermost: FrameType | None) -> bool:
    """Whether an activation checkpoint has been set since the body began, in `outermost`."""
    frame = inspect.currentframe()
    while frame is not None and frame is not outermost:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _state_of(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else random_state()


def _restore(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        set_random_state(state)

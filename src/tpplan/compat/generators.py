# pyright: reportPrivateUsage=false
"""Generators of random numbers."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

GENERATOR = threading.RLock()
"""Held by whoever draws from torch's generator on the CPU, or changes its state, where other threads do so as well."""


def random_state() -> Tensor:
    """The state of torch's generator on the CPU.

    torch takes it under a lock of its own, in which garbage may be collected and another thread run: one that asked as
    well would wait for ever. So threads ask one after the other. For every torch.
    """
    with GENERATOR:
        return torch.get_rng_state()


def set_random_state(state: Tensor) -> None:
    """Put torch's generator on the CPU back to a state. For every torch."""
    with GENERATOR:
        torch.set_rng_state(state)

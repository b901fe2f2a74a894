"""Checks of an input, as models write them; pytest would rewrite those in a file of tests."""

from __future__ import annotations

import torch
from torch import Tensor


def if_raise(x: Tensor) -> None:
    if x.isnan().any():
        raise ValueError("not a number")


def unless_raise(x: Tensor) -> None:
    if x.abs().max() < 100:
        return
    raise ValueError("too large")


def asserted(x: Tensor) -> None:
    assert (x.abs() < 100).all(), "too large"


def checked(x: Tensor) -> None:
    torch._check_tensor_all(x.abs() < 100, lambda: f"too large: {x.abs().max()}")  # pyright: ignore


def or_long(x: Tensor) -> None:
    assert x.abs().max() < 100 or x.shape[1] > 12, "too large"

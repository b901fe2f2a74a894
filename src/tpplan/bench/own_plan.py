"""Models that transformers shards by the plan that it has for them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn


def can_load() -> bool:
    """Whether transformers has what it shards with."""
    return importlib.util.find_spec("accelerate") is not None


def loaded_by_transformers(model: Any) -> nn.Module:
    """The same model, loaded by transformers with its own plan; all ranks of the default group come here."""
    names = [tempfile.mkdtemp(prefix="tpplan-bench-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    if dist.get_rank() == 0:
        model.save_pretrained(names[0])
    dist.barrier()
    load: Any = model.from_pretrained  # a class method
    with _launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # older versions don't have what newer ones want instead
        loaded: nn.Module = load(names[0], tp_plan="auto", dtype=next(model.parameters()).dtype).eval()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0], ignore_errors=True)
    return loaded


@contextmanager
def _launched() -> Generator[None]:
    """What torchrun tells a process, by which transformers knows the ranks."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = {name: os.environ.get(name) for name in told}
    os.environ |= told
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

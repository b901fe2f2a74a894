"""One rank of the benchmark of checkpoints."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn

from tpplan.api import parallelize, save_weights
from tpplan.checkpoint.loading import load
from tpplan.compat.dtensors import local_of

_CHUNK = 4 * 1024**2
_MIB = 2**20


def rank_main(rank: int, size: int, folder: str, rounds: int) -> None:
    """Measure, and write what was measured to the rank's own folder."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    warnings.simplefilter("ignore")
    told = _measured(Path(folder), rank, rounds)
    Path(folder, str(rank), "told.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def _measured(folder: Path, rank: int, rounds: int) -> dict[str, Any]:
    source = folder / "checkpoint"
    told, share = _memory(folder)
    told |= {"read": [], "load": []}
    for _ in range(rounds):
        told["read"].append(_timed(lambda: read_plainly(source, share, rank)))
        told["load"].append(_load_seconds(source))
    told["cold_read_seconds"] = round(_timed(lambda: read_plainly(source, share, rank), source), 2)
    told["cold_load_seconds"] = round(_load_seconds(source, source), 2)
    has_accelerate = importlib.util.find_spec("accelerate") is not None  # without it transformers refuses
    seconds = _timed(lambda: _of_transformers(source)) if has_accelerate else None
    return told | {"transformers_seconds": None if seconds is None else round(seconds, 2)}


def _memory(folder: Path) -> tuple[dict[str, Any], int]:
    """What loading and saving need besides the shards, and what is read; and the bytes of the shards."""
    model = _sharded(folder / "checkpoint")
    with peak_memory() as loading:
        loaded = load(model, folder / "checkpoint")
    parts = [local_of(parameter) for parameter in model.parameters()]
    share, largest = sum(part.nbytes for part in parts), max(part.nbytes for part in parts)
    with peak_memory() as saving:
        seconds = _timed(lambda: save_weights(model, folder / "saved", file_bytes=500 * _MIB))
    dist.barrier()
    shutil.rmtree(folder / "saved", ignore_errors=True)
    told = {
        "share_mib": round(share / _MIB, 1),
        "bytes_ratio": round(loaded.bytes_read / share, 5),
        "load_memory_mib": round((loading[0] - share - largest) / _MIB, 1),
        "save_memory_mib": round(saving[0] / _MIB, 1),
        "save_seconds": round(seconds, 2),
    }
    return told, share


def _load_seconds(source: Path, cold: Path | None = None) -> float:
    model = _sharded(source)
    return _timed(lambda: load(model, source), cold)


def _sharded(source: Path) -> nn.Module:
    """The checkpoint's model on `meta`, parallelized."""
    config = cast("Any", transformers.AutoConfig).from_pretrained(source)
    with torch.device("meta"):
        model = cast("Any", transformers.AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    return parallelize(model, "llama")


def _of_transformers(source: Path) -> None:
    """What transformers does with the same files."""
    kind: Any = transformers.AutoModelForCausalLM
    kind.from_pretrained(source, tp_plan="auto", dtype=torch.bfloat16)


def read_plainly(source: Path, count: int, rank: int) -> None:
    """Read so many bytes into new memory, one stretch after the other; each rank begins where the last one ends."""
    memory = memoryview(cast("Any", torch.empty(count, dtype=torch.uint8).numpy()))
    skip, done = rank * count, 0
    files = sorted(source.glob("*.safetensors"))
    for path in files * 2:  # with what is stored on all ranks there may be more to read than there is
        size = path.stat().st_size
        if skip >= size:
            skip -= size
            continue
        with open(path, "rb", buffering=0) as file:
            file.seek(skip)
            skip = 0
            while done < count:
                read = file.readinto(memory[done : done + _CHUNK])
                if not read:
                    break
                done += read


def _timed(work: Callable[[], object], cold: Path | None = None) -> float:
    """The seconds from when all ranks begin to when this one is done."""
    gc.collect()
    if cold is not None:
        for path in cold.glob("*.safetensors"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def private_memory() -> int:
    """The bytes that this process alone holds, without what is mapped from files and unchanged."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


@contextmanager
def peak_memory(every: float = 0.02) -> Generator[list[int]]:
    """The most private memory in the block, over what there was before; looked at so often, in seconds."""
    gc.collect()
    before, found, over = private_memory(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(every):
            found[0] = max(found[0], private_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


__all__ = ["peak_memory", "private_memory", "rank_main", "read_plainly"]

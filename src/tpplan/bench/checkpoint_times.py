"""Checkpoints: the bytes, the memory and the time that loading and saving take, on real processes."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn  # pyright: ignore[reportUnknownVariableType]

from tpplan.bench.checkpoint_ranks import rank_main
from tpplan.bench.subjects import Architecture, tiny_transformer

_FILE_BYTES = 500 * 1024**2
_BLOCK = 1 << 22
_TIMES = ("load", "read")


def measure(
    ranks: int = 2, layers: int = 17, hidden: int = 2048, rounds: int = 5, file_bytes: int = _FILE_BYTES
) -> dict[str, Any]:
    """Measure one number of ranks.

    Args:
        ranks: gloo processes on this machine.
        layers, hidden: of a Llama in bfloat16; the defaults are 2.2 GiB.
        rounds: how often loading and a plain read are timed, in turns.
        file_bytes: of each file of the checkpoint.

    Returns:
        Plain data: one row. Times are the slowest rank's, in seconds; memory is the largest of all ranks, in MiB.
    """
    with tempfile.TemporaryDirectory(prefix="tpplan-bench-") as folder:
        source = Path(folder, "checkpoint")
        count = write_checkpoint(source, layers, hidden, file_bytes)
        whole = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        for rank in range(ranks):
            Path(folder, str(rank)).mkdir()
        spawn(rank_main, (ranks, folder, rounds), ranks)  # pyright: ignore[reportUnknownArgumentType]
        told = [json.loads(Path(folder, str(rank), "told.json").read_text()) for rank in range(ranks)]
    row = {"ranks": ranks, "gib": round(whole / 2**30, 2), "files": count}
    return {"rows": [row | _merged(told)]}


def _merged(told: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, first in told[0].items():
        if not isinstance(first, list):
            merged[key] = None if first is None else max(one[key] for one in told)
    load, read = ([max(several) for several in zip(*(one[key] for one in told), strict=True)] for key in _TIMES)
    ratios = [ours / plain for ours, plain in zip(load, read, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    merged |= {"load_seconds": round(statistics.median(load), 2), "read_seconds": round(statistics.median(read), 2)}
    return merged | {"ratio": round(middle, 2), "low": round(low, 2), "high": round(high, 2)}


def write_checkpoint(folder: Path, layers: int, hidden: int, file_bytes: int) -> int:
    """Write a checkpoint of a Llama in bfloat16, with config and index; the number of its files."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    model: Any = tiny_transformer(
        Architecture("llama"),
        layers,
        "meta",
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        dtype=torch.bfloat16,
    ).to(torch.bfloat16)
    model.config.save_pretrained(folder)
    block = torch.randn(_BLOCK).mul_(0.02).bfloat16()
    files: list[dict[str, torch.Tensor]] = [{}]
    names: list[list[str]] = [[]]
    held = 0
    for name, tensor in model.state_dict().items():
        if held and held + tensor.nbytes > file_bytes:
            _write(save_file, folder, files[-1], len(files))
            files.append({})
            names.append([])
            held = 0
        files[-1][name] = block.repeat(-(-tensor.numel() // _BLOCK))[: tensor.numel()].view(tensor.shape)
        names[-1].append(name)
        held += tensor.nbytes
    _write(save_file, folder, files[-1], len(files))
    table = {name: _file(number + 1) for number, several in enumerate(names) for name in several}
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(files)


def _file(number: int) -> str:
    return f"model-{number:05}.safetensors"


def _write(save_file: Any, folder: Path, tensors: dict[str, torch.Tensor], number: int) -> None:
    save_file(tensors, folder / _file(number), metadata={"format": "pt"})
    tensors.clear()
    with open(folder / _file(number), "rb") as file:
        os.fsync(file.fileno())  # pages that aren't on the disk yet would count as changed by whoever maps them


__all__ = ["measure", "write_checkpoint"]

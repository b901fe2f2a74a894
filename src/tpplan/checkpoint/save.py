"""Saving: the stock model's checkpoint from a parallelized model, whole tensors under the stock names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.files import INDEX, SINGLE, problem

FILE_BYTES = 5 * 1024**3


def save_weights(model: nn.Module, folder: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES) -> None:
    """Write a parallelized (or a stock) model as a checkpoint of the stock model.

    Every rank must call this; the tensors are gathered one by one, and the first rank of the world writes them.

    Args:
        model: the model.
        folder: where to; made if need be.
        file_bytes: the size past which a further file is begun.

    Raises:
        CheckpointError: TP121, if a tensor is still on `meta`.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    path = Path(folder)
    missing = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    if missing:
        raise problem(
            f"`{missing[0]}` and {len(missing) - 1} more have no numbers yet", "load or initialise them first"
        )
    if writes:
        path.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    total = size = 0
    for name, tensor in _distinct(model):
        whole = _gather(tensor)
        if held and size + whole.nbytes > file_bytes:
            parts.append((_write(path, held, len(parts), writes), list(held)))
            held, size = {}, 0
        size += whole.nbytes
        total += whole.nbytes
        if writes:
            whole = whole.cpu().contiguous()
        held[name] = whole
    parts.append((_write(path, held, len(parts), writes), list(held)))
    if writes:
        _name_files(path, parts, total)
    if dist.is_initialized():
        dist.barrier()


def _distinct(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The state_dict's tensors, tied ones once, under their first name."""
    seen: set[int] = set()
    found: list[tuple[str, Tensor]] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found.append((name, tensor))
    return found


def _gather(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _write(folder: Path, held: dict[str, Tensor], number: int, writes: bool) -> Path:
    path = folder / f"part-{number:05}.safetensors"
    if writes:
        save_file(held, path, metadata={"format": "pt"})
    return path


def _name_files(folder: Path, parts: list[tuple[Path, list[str]]], total: int) -> None:
    if len(parts) == 1:
        os.replace(parts[0][0], folder / SINGLE)
        return
    table: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, start=1):
        final = folder / f"model-{number:05}-of-{len(parts):05}.safetensors"
        os.replace(path, final)
        table |= dict.fromkeys(names, final.name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

"""Loading: each rank reads its own slices from safetensors files, and nothing else."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.files import locate_tensors, open_tensors, problem
from tpplan.compat import local_of, named_modules, own_buffers, own_parameters, transient_buffers
from tpplan.runtime.state import part_of


def load_weights(model: nn.Module, source: str | os.PathLike[str]) -> nn.Module:
    """Load a checkpoint of the stock model into a parallelized (or a stock) model, in place.

    Names and shapes are compared first; nothing is changed unless all fit. Tensors still on `meta` are made on the
    device of their mesh.

    Args:
        model: the model; its parameters may be DTensors sharded over one axis.
        source: a safetensors file, an index, or a folder with either.

    Returns:
        `model` itself.

    Raises:
        CheckpointError: TP121, with every name that is missing or doesn't fit.
    """
    files = locate_tensors(source)
    wanted = _wanted(model)
    chosen = _check(wanted, files)
    by_file: dict[Path, list[tuple[str, list[tuple[nn.Module, str]]]]] = defaultdict(list)
    for name, holders in chosen.items():
        by_file[files[name]].append((name, holders))
    with torch.no_grad():
        for path, entries in by_file.items():
            with open_tensors(path) as opened:
                for name, holders in entries:
                    _fill(holders, opened.get_slice(name))
    return model


def _wanted(model: nn.Module) -> dict[int, tuple[Tensor, list[str], list[tuple[nn.Module, str]]]]:
    """Every distinct tensor of the state_dict: (tensor, its names, where it is held)."""
    found: dict[int, tuple[Tensor, list[str], list[tuple[nn.Module, str]]]] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        transient = transient_buffers(module)
        for leaf, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            if tensor is None or leaf in transient:
                continue
            entry = found.setdefault(id(tensor), (tensor, [], []))
            entry[1].append(f"{prefix}.{leaf}" if prefix else leaf)
            entry[2].append((module, leaf))
    return found


def _check(
    wanted: dict[int, tuple[Tensor, list[str], list[tuple[nn.Module, str]]]], files: Mapping[str, Path]
) -> dict[str, list[tuple[nn.Module, str]]]:
    shapes = _shapes(files)
    chosen: dict[str, list[tuple[nn.Module, str]]] = {}
    notes: list[str] = []
    for tensor, names, holders in wanted.values():
        name = next((n for n in names if n in files), None)
        if name is None:
            notes.append(f"`{names[0]}` is not in the checkpoint")
        elif shapes[name] != tuple(tensor.shape):
            notes.append(f"`{name}` has shape {list(shapes[name])} there and {list(tensor.shape)} in the model")
        else:
            chosen[name] = holders
    if notes:
        unused = sorted(set(files) - {n for _, names, _ in wanted.values() for n in names})
        more = [f"the checkpoint has `{name}`, which the model doesn't" for name in unused[:5]]
        raise problem(
            f"{len(notes)} of the model's {len(wanted)} tensors can't be loaded from the checkpoint",
            "load it into the class that it was saved from: a model with a head and the bare model name their "
            "parameters differently",
            *notes[:20],
            *more,
        )
    return chosen


def _shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in dict.fromkeys(files.values()):
        with open_tensors(path) as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
    return shapes


def _fill(holders: list[tuple[nn.Module, str]], piece: Any) -> None:
    owner, leaf = holders[0]
    held = own_parameters(owner).get(leaf)
    tensor = held if held is not None else own_buffers(owner)[leaf]
    assert tensor is not None
    local = local_of(tensor)
    read = _read(piece, tensor).to(local.dtype)
    if not local.is_meta:
        local.copy_(read)
        return
    device = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else torch.device("cpu")
    filled = torch.empty_like(tensor, device=device)
    local_of(filled).copy_(read)
    if isinstance(held, nn.Parameter):
        filled = nn.Parameter(filled, requires_grad=held.requires_grad)
    for module, name in holders:
        setattr(module, name, filled)


def _read(piece: Any, tensor: Tensor) -> Tensor:
    """What this rank stores of the tensor in the file."""
    if not isinstance(tensor, DTensor):
        return piece[(slice(None),) * tensor.dim()]
    read = torch.empty_like(local_of(tensor), device="cpu")
    for box in part_of(tensor).boxes:
        bounds = tuple(slice(start, start + size) for start, size in zip(box.start, box.sizes, strict=True))
        box.of_part(read).copy_(piece[bounds])
    return read

"""Folders of torch.distributed.checkpoint: where the chunks of each tensor lie, and their numbers.

in:  `.metadata`, a pickle, of which nothing but the classes that torch writes is made
out: tensors in pieces, one for each chunk, which is read whole by the ranks that need any of it

Torch's own reader runs whatever is in that pickle, doesn't check that chunks cover a tensor, and unpickles a chunk once
for each box of it.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import pickle
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tpplan.checkpoint.assembled import Assembled, Piece, Source, assembled
from tpplan.checkpoint.files import METADATA, CheckpointError, problem, unreadable
from tpplan.checkpoint.header import Stored, dtype_name
from tpplan.checkpoint.meter import Meter
from tpplan.runtime.parameters.pieces import Box

_WRITTEN = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.serialization": frozenset(("_get_layout",)),
    "collections": frozenset(("OrderedDict",)),
}  # fmt: skip
_AGAIN = "save it again, with torch.distributed.checkpoint or `tpplan.save_weights`"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """What metadata is made of; nothing else is looked up, as it could run anything."""
        if module_name == "torch":
            held = getattr(torch, global_name, None)
            if held is torch.Size or isinstance(held, torch.dtype):
                return held
        elif module_name.partition(".")[0] == "pathlib":
            return pathlib.PurePath
        elif global_name in _WRITTEN.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which torch doesn't write there")


def read_distributed(path: Path, meter: Meter) -> tuple[dict[str, Source], dict[str, int], str]:
    """The tensors of a folder, by name, the lengths of its files, and a digest of both.

    Args:
        path: its `.metadata`.
        meter: counts what is read.

    Raises:
        CheckpointError: TP121, with everything that is wrong.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    meter.add(len(text))
    metadata = _metadata(path, text)
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, place in cast("Mapping[Any, Any]", metadata.storage_data).items():
        places.setdefault(index.fqn, {})[tuple(index.offset or ())] = place
    tensors = [
        _stored(name, path.parent, held, places.get(name, {}))
        for name, held in metadata.state_dict_metadata.items()
        if isinstance(held, TensorStorageMetadata)
    ]
    ends: dict[Path, int] = {}
    for chunk in (piece.stored for held in tensors for piece in held.pieces if isinstance(piece.stored, Stored)):
        ends[chunk.path] = max(ends.get(chunk.path, 0), chunk.start + chunk.bytes)
    files: dict[Path, int] = {}
    reasons = [reason for held in tensors if (reason := _fault(held)) is not None]
    for file, end in ends.items():
        try:
            files[file] = size = os.stat(file).st_size
        except OSError as error:
            reasons.append(f"`{file.name}` can't be read: {error.strerror}")
            continue
        if size < end:
            reasons.append(f"`{file.name}` has {size} bytes, and should have {end}: it was cut off")
    if reasons:
        raise _broken(path, f"has {len(reasons)} faults", *reasons)
    lengths = {file.name: size for file, size in files.items()}
    sources = {held.name: assembled(held.name, held.shape, held.pieces) for held in tensors}
    return sources, lengths, hashlib.sha256(text + repr(sorted(lengths.items())).encode()).hexdigest()


def _broken(path: Path, what: str, *notes: str) -> CheckpointError:
    message = f"`{path.parent}`, a checkpoint of torch.distributed.checkpoint, {what}"
    return problem(message, f"complete it; or {_AGAIN}", *notes[:20])


def _metadata(path: Path, text: bytes) -> Metadata:
    try:
        metadata = _Unpickler(io.BytesIO(text)).load()
    except Exception as error:  # a pickle that isn't one fails with anything
        raise _broken(path, f"has a `{METADATA}` that can't be read: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise _broken(path, f"has a `{METADATA}` that holds something else")
    return metadata


def _stored(name: str, folder: Path, held: TensorStorageMetadata, places: Mapping[tuple[int, ...], Any]) -> Assembled:
    pieces: list[Piece] = []
    for chunk in held.chunks:
        place = places.get(tuple(chunk.offsets))
        if place is None:
            continue  # the tensor isn't covered, which is told of
        relative = pathlib.PurePosixPath(place.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise problem(f"`{folder}` names `{relative}`, which isn't in the folder", _AGAIN)
        if getattr(place, "transform_descriptors", None):
            raise problem(f"`{folder}` is compressed or encrypted", "load it with torch.distributed.checkpoint")
        start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        kind = dtype_name(held.properties.dtype)
        stored = Stored(name, folder / relative, kind, sizes, place.offset, place.length, pickled=True)
        pieces.append(Piece(stored, Box(start, (0,) * len(sizes), sizes, True)))
    return Assembled(name, tuple(held.size), tuple(pieces))


def _fault(held: Assembled) -> str | None:
    """Why a tensor's chunks aren't the tensor; None if they are. Their edges cut it into cells, each of one chunk."""
    boxes = [piece.box for piece in held.pieces if 0 not in piece.box.sizes]
    if not all(_is_within(box, held.shape) for box in boxes):
        return f"`{held.name}` has chunks that aren't within its shape {list(held.shape)}"
    edges = [
        sorted({0, count, *(edge for box in boxes for edge in (box.start[d], box.start[d] + box.sizes[d]))})
        for d, count in enumerate(held.shape)
    ]
    chunks = torch.zeros([len(of_dim) - 1 for of_dim in edges], dtype=torch.int32)
    for box in boxes:
        sides = zip(edges, box.start, box.sizes, strict=True)
        chunks[tuple(slice(bisect_left(e, first), bisect_left(e, first + n)) for e, first, n in sides)] += 1
    if bool((chunks > 1).any()):
        return f"`{held.name}` has chunks that overlap"
    return f"`{held.name}` isn't there as a whole" if bool((chunks == 0).any()) else None


def _is_within(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.sizes) == len(shape):
        return False
    dims = zip(box.start, box.sizes, shape, strict=True)
    return all(start >= 0 and 0 <= size <= whole - start for start, size, whole in dims)


def read_chunk(chunk: Stored, meter: Meter) -> Tensor:
    """The numbers of a pickled tensor.

    Raises:
        CheckpointError: TP121, if it isn't a tensor of the promised shape.
    """
    with open(chunk.path, "rb", buffering=0) as file:
        read = os.pread(file.fileno(), chunk.bytes, chunk.start)
    meter.add(len(read))
    try:
        numbers = torch.load(io.BytesIO(read), map_location="cpu", weights_only=True)
    except Exception as error:
        raise problem(f"`{chunk.path}` can't be read: {str(error).splitlines()[0]}", _AGAIN) from None
    if not isinstance(numbers, Tensor) or _long(numbers.shape) != _long(chunk.shape):
        raise problem(f"`{chunk.path}` holds something else than its `{METADATA}` says", _AGAIN)
    return numbers.reshape(chunk.shape)


def _long(shape: tuple[int, ...]) -> list[int]:
    """A shape without the dims of one entry, of which tensors that are stacked get more."""
    return [count for count in shape if count != 1]


__all__ = ["read_chunk", "read_distributed"]

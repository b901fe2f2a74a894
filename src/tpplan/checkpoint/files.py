"""Where a checkpoint is: the names of its files, and what else a folder may turn out to be."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tpplan.plan import Diagnostic, PlanError, Severity

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
METADATA = ".metadata"
"""What torch.distributed.checkpoint calls the table of what it has saved."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHOWN = 3


class CheckpointError(PlanError):
    """A checkpoint and a model don't fit together; all findings are in `diagnostics`."""


def finding(
    message: str, way_out: str, *notes: str, subject: str | None = None, severity: Severity = Severity.ERROR
) -> Diagnostic:
    """A TP121 finding."""
    return Diagnostic(code="TP121", message=message, help=way_out, notes=notes, subject=subject, severity=severity)


def problem(message: str, way_out: str, *notes: str) -> CheckpointError:
    """A CheckpointError with one TP121 finding."""
    return CheckpointError([finding(message, way_out, *notes)])


def unreadable(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    """What is said of a file that the system refuses to open or to read."""
    if isinstance(error, PermissionError):
        return problem(
            f"`{path}` can't be read: permission denied", "let the user that runs this read the checkpoint's files"
        )
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return problem(f"`{path}` can't be read: {text}", "check the path, the disk and the network")


def listed(names: Sequence[str], shown: int = _SHOWN) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"`{name}`" for name in names[:shown]) + more


def find_checkpoint(source: str | os.PathLike[str]) -> Path:
    """The index, the safetensors file, or the table of torch.distributed.checkpoint that a checkpoint starts from.

    Args:
        source: one of these, or a folder with it; of several, the index counts.

    Raises:
        CheckpointError: TP121, if there is neither; it says what is there instead.
    """
    path = Path(source)
    try:
        if path.is_dir():
            for name in (INDEX, SINGLE, METADATA):
                if (path / name).is_file():
                    return path / name
            raise _no_safetensors(path, sorted(os.listdir(path)))
        if path.is_file():
            if path.suffix in _PICKLES:
                raise _pickles(path, [path.name])
            return path
        if path.exists():
            raise problem(f"`{path}` is neither a file nor a folder", "name a safetensors file or a folder")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not path.parent.exists():
        raise problem(
            f"there is no folder `{source}` on this machine; it looks like the name of a model on the Hugging Face hub",
            f"download it first: `hf download {source} --local-dir {path.name}`, and load `{path.name}`",
        )
    raise problem(
        f"there is no checkpoint at `{path}`", f"name a safetensors file, or a folder with {SINGLE} or {INDEX}"
    )


def _no_safetensors(folder: Path, names: list[str]) -> CheckpointError:
    ours = [name for name in names if name.endswith(".safetensors")]
    if ours:
        return problem(
            f"`{folder}` has {listed(ours)}, but neither {SINGLE} nor {INDEX}",
            "name the file itself" if len(ours) == 1 else f"complete the checkpoint: {INDEX} is missing",
        )
    pickles = [name for name in names if name.endswith((*_PICKLES, ".bin.index.json"))]
    if pickles:
        return _pickles(folder, pickles)
    return problem(
        f"there is no checkpoint at `{folder}`: it has neither {SINGLE} nor {INDEX}",
        "name the folder that `save_pretrained` or `tpplan.save_weights` wrote",
    )


def _pickles(path: Path, names: list[str]) -> CheckpointError:
    return problem(
        f"`{path}` holds pickles ({listed(names)}), not safetensors; tpplan reads no pickles",
        "convert it once: load it into the stock model, and call its `save_pretrained(folder)`, or "
        "`tpplan.save_weights(model, folder)`",
    )


__all__ = [
    "INDEX",
    "METADATA",
    "SINGLE",
    "CheckpointError",
    "find_checkpoint",
    "finding",
    "listed",
    "problem",
    "unreadable",
]

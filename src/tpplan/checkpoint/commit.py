"""Commits: a folder changes from one checkpoint to another as a whole, by one rename.

A reader of a folder looks for `model.safetensors` first and then for the index (transformers), or the other way round.
Both, and who reads config.json too, must see all of the old checkpoint or all of the new one, whenever the save is
killed. The order of operations, each of them on the disk before the next:

1. What a killed save has left behind is settled and removed (`recover`).
2. All new files are written to a folder of the save's own, `.tpplan-save-…`, with a journal: the names of the data
   files that will be there, and of those that the old index names.
3. Files that only the new index will name get names that the folder doesn't have, and move there. No reader knows them.
4. The commit. What is left are the files that every reader knows: model.safetensors, the index, config.json,
   generation_config.json. If one of them changes, that is one `os.replace`. If there was no checkpoint, that with the
   numbers comes last. Otherwise each becomes a symbolic link through `.tpplan-save-…/now`, itself a link to the folder
   with the old files, so that nothing changes; and then one `os.replace` of `now` changes all of them. A file that
   isn't in the new checkpoint, such as model.safetensors beside a new index, is then a link to nothing, and to a reader
   no file.
5. `recover` again: links become files, data files that the index doesn't name are deleted, and the save's folder.

Neither safetensors nor torch's writers do any of this: they write over files that are there, one after the other. One
`os.replace` of the index isn't enough where the config changes as well, or one of model.safetensors and the index goes:
killed in between, two readers find different checkpoints.

Killed before 4, `recover` restores the old folder; after it, it completes the new one. Where the file system has no
links, files are replaced one by one, those with numbers last: then each reader still sees the numbers of one
checkpoint, but two readers may differ for a moment, as may the config.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpplan.checkpoint.files import INDEX, SINGLE
from tpplan.checkpoint.writer import sync, write_file

PREFIX = ".tpplan-save-"
_JOURNAL = "journal.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """A save's own folder, inside of the one that it changes.

    Attributes:
        folder: that one.
        token: by which no other save is called.
        names: of the data files, in their order.
    """

    folder: Path
    token: str
    names: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Of the save's own folder."""
        return self.folder / f"{PREFIX}{self.token}"

    @property
    def new(self) -> Path:
        """Where files are that readers know by name."""
        return self.path / "new"

    @property
    def obsolete(self) -> str:
        """What mustn't be beside the new checkpoint, as a reader might prefer it."""
        return INDEX if self.names == (SINGLE,) else SINGLE

    def staged(self, name: str) -> Path:
        """Where a data file is before the commit."""
        return self.new / name if name == SINGLE else self.path / name

    def is_visible(self) -> bool:
        """Whether this process sees the very folder that the first rank made."""
        return (self.path / _JOURNAL).is_file()


def begin(folder: Path, count: int) -> Stage:
    """Make a stage for a checkpoint of `count` data files, and the folder itself if need be."""
    os.makedirs(folder, exist_ok=True)
    recover(folder)
    token = secrets.token_hex(4)
    plain = _names(count, "")
    names = _names(count, f"{token}-") if any(os.path.lexists(folder / name) for name in plain[1:]) else plain
    stage = Stage(folder, token, names)
    placed = {name for name in names if name != SINGLE}
    journal = sorted(placed | (_named_by_index(folder) or set()))
    os.mkdir(stage.path)
    try:
        os.mkdir(stage.new)
        write_file(stage.path / _JOURNAL, json.dumps(journal).encode())
    except OSError:
        shutil.rmtree(stage.path, ignore_errors=True)
        raise
    return stage


def place(stage: Stage, names: Iterable[str]) -> None:
    """Move data files to where only the new index will look for them."""
    moved = [name for name in names if name != SINGLE]
    for name in moved:
        os.rename(stage.staged(name), stage.folder / name)
    if moved:
        sync(stage.folder)


def commit(stage: Stage) -> None:
    """Make the folder the new checkpoint: all that is in `stage.new`, and either an index or one file."""
    sync(stage.new)
    there = {name for name in (SINGLE, INDEX) if os.path.lexists(stage.folder / name)}
    changes = [name for name in sorted(os.listdir(stage.new)) if _differs(stage, name)]
    obsolete = sorted(there & {stage.obsolete})
    if len(changes) + len(obsolete) > 1 and there:
        try:
            _exchange(stage, changes + obsolete)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    _one_by_one(stage, changes)


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EINVAL)


def finish(stage: Stage) -> None:
    """After the commit: bring it to the disk, and remove what it has replaced."""
    sync(stage.path)
    sync(stage.folder)
    if os.path.lexists(stage.folder / stage.obsolete):
        os.unlink(stage.folder / stage.obsolete)
    recover(stage.folder)
    sync(stage.folder)


def recover(folder: Path) -> None:
    """Complete or undo what an ended save has left in a folder, whichever it was on the way to."""
    _settle(folder)
    named = _named_by_index(folder)
    for stage in sorted(folder.glob(f"{PREFIX}*")):
        if not stage.is_dir() or stage.is_symlink():
            os.unlink(stage)
            continue
        for name in _journal(stage):
            if named is not None and name not in named and os.path.lexists(folder / name):
                os.unlink(folder / name)
        shutil.rmtree(stage)


def _names(count: int, token: str) -> tuple[str, ...]:
    if count == 1:
        return (SINGLE,)
    return tuple(f"model-{token}{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))


def _differs(stage: Stage, name: str) -> bool:
    """Whether a file is new; configs are mostly the same as before."""
    there = stage.folder / name
    if name == SINGLE or not there.is_file():
        return True
    return (stage.new / name).read_bytes() != there.read_bytes()


def _exchange(stage: Stage, changes: list[str]) -> None:
    old, now, then = stage.path / "old", stage.path / "now", stage.path / "then"
    os.mkdir(old)
    for name in changes:
        if os.path.lexists(stage.folder / name):
            _keep(stage.folder / name, old / name)
    os.symlink("old", now)
    os.symlink("new", then)
    sync(old)
    for name in changes:
        link = stage.path / f"link-{name}"
        os.symlink(f"{stage.path.name}/{now.name}/{name}", link)
        os.replace(link, stage.folder / name)
    sync(stage.folder)
    sync(stage.path)
    os.replace(then, now)


def _one_by_one(stage: Stage, changes: list[str]) -> None:
    for name in sorted(changes, key=lambda name: name in (SINGLE, INDEX)):
        sync(stage.folder)
        os.replace(stage.new / name, stage.folder / name)


def _settle(folder: Path) -> None:
    """Make files of the links through a stage, and nothing of those to nothing."""
    for path in [path for path in sorted(folder.iterdir()) if path.is_symlink()]:
        target = os.readlink(path)
        if not target.startswith(PREFIX):
            continue
        if not os.path.lexists(folder / target):
            os.unlink(path)
            continue
        kept = folder / Path(target).parts[0] / f"kept-{path.name}"
        if os.path.lexists(kept):
            os.unlink(kept)
        _keep(folder / target, kept)
        os.replace(kept, path)


def _keep(source: Path, target: Path) -> None:
    """A second name of a file. A link, as in a cache of transformers', is copied."""
    if os.path.islink(source):
        os.symlink(os.path.realpath(source), target)
    else:
        os.link(source, target)


def _named_by_index(folder: Path) -> set[str] | None:
    """The data files that the folder's index names; None if it can't be read, and nothing should be deleted."""
    try:
        table: Any = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name for name in table.values() if _is_data(name)}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _journal(stage: Path) -> list[str]:
    try:
        names: Any = json.loads((stage / _JOURNAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []  # killed before there was anything to note
    return [name for name in names if _is_data(name)]


def _is_data(name: Any) -> bool:
    """Whether it is the name of a file that a save may delete: in the folder itself, and named by an index only."""
    return isinstance(name, str) and name == os.path.basename(name) and name != SINGLE and name.endswith(".safetensors")


__all__ = ["PREFIX", "Stage", "begin", "commit", "finish", "place", "recover"]

"""A folder changes as a whole: killed or failed at any operation, it holds the old checkpoint or the new one."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.marking import in_thirds
from tpplan import CheckpointError, load_weights, save_weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "link", "symlink")
FORMS = {"one file": 1 << 30, "index": 80, "longer index": 40}


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are killed here, not the machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # pyright: ignore[reportUnknownLambdaType]


class Config:
    """Stands in for one of transformers'."""

    def __init__(self, version: int) -> None:
        self.version = version

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"version": self.version}))


class Versioned(nn.Module):
    """A model whose every number is its version."""

    def __init__(self, version: int, configured: bool = True) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(4, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(version)
        if configured:
            self.config = Config(version)


class Killed(BaseException):
    """What takes the place of a process's end: nothing that it does from then on has an effect."""


class Faults:
    """Counts the operations on files, and lets the one of this number fail; those after it as well, if `dead`."""

    def __init__(self, number: int, error: Callable[[], BaseException], dead: bool) -> None:
        self.number, self.error, self.dead = number, error, dead
        self.count = 0
        self.name = ""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in OPERATIONS:
                stack.enter_context(mock.patch.object(os, name, self._failing(name, getattr(os, name))))
            yield

    def _failing(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_WRONLY:
                return operation(*arguments, **options)
            self.count += 1
            if self.count == self.number or (self.dead and self.count > self.number):
                self.name = self.name or name
                if name == "write" and self.count == self.number:
                    operation(arguments[0], bytes(arguments[1])[:3])  # as far as it came
                raise self.error()
            return operation(*arguments, **options)

        return called


def single_first(folder: Path) -> dict[str, torch.Tensor] | None:
    return _of_single(folder) or _of_index(folder)


def index_first(folder: Path) -> dict[str, torch.Tensor] | None:
    return _of_index(folder) or _of_single(folder)


def ours(folder: Path) -> dict[str, torch.Tensor] | None:
    if not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return None
    return load_weights(Versioned(-1), folder).state_dict()


def _of_single(folder: Path) -> dict[str, torch.Tensor] | None:
    return load_file(folder / SINGLE) if (folder / SINGLE).is_file() else None


def _of_index(folder: Path) -> dict[str, torch.Tensor] | None:
    if not (folder / INDEX).is_file():
        return None
    table = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in table.items()}


def version_of(reader: Callable[[Path], dict[str, torch.Tensor] | None], folder: Path) -> int:
    """The version that a reader finds; 0 for no checkpoint."""
    state = reader(folder)
    if state is None:
        return 0
    assert set(state) == set(Versioned(0).state_dict())
    numbers = {int(number) for tensor in state.values() for number in tensor.reshape(-1)}
    assert len(numbers) == 1, f"{reader.__name__}: a mixture of {numbers}"
    return numbers.pop()


def versions(folder: Path) -> dict[str, int]:
    """What each reader finds, and the config; of nothing where there is no checkpoint."""
    found = {reader.__name__: version_of(reader, folder) for reader in (single_first, index_first, ours)}
    config = folder / "config.json"
    if any(found.values()):
        found["config"] = json.loads(config.read_text())["version"] if config.is_file() else 0
    return found


def made(folder: Path, form: str | None) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    if form is not None:
        save_weights(Versioned(1), folder, file_bytes=FORMS[form])


def assert_tidy(folder: Path, version: int) -> None:
    """No leftovers, no links, and one checkpoint."""
    assert set(versions(folder).values()) == {version}
    names = {path.name for path in folder.iterdir()}
    data = set(json.loads((folder / INDEX).read_text())["weight_map"].values()) if INDEX in names else {SINGLE}
    assert names == {"tokenizer.json", "config.json", *data} | ({INDEX} & names)
    assert not any(path.is_symlink() for path in folder.iterdir())


CHANGES = [(old, new) for old in (None, *FORMS) for new in ("one file", "index")] + [("index", "longer index")]
QUICK = [("index", "one file")]
SLOW = [
    (None, "index"),
    ("index", "longer index"),
    ("one file", "index"),
    ("longer index", "index"),
    ("index", "index"),
]


@pytest.mark.parametrize(("old", "new"), in_thirds(QUICK, SLOW, CHANGES), ids=str)
def test_killed_at_any_operation_a_folder_holds_one_checkpoint(old: str | None, new: str, tmp_path: Path) -> None:
    seen: list[int] = []
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        made(folder, old)
        faults = Faults(number, Killed, dead=True)
        try:
            with faults():
                save_weights(Versioned(2), folder, file_bytes=FORMS[new])
        except Killed:
            pass
        found = versions(folder)
        assert len(set(found.values())) == 1, f"killed at operation {number}, {faults.name}: {found}"
        seen.append(next(iter(found.values())))
        save_weights(Versioned(3), folder, file_bytes=FORMS["index" if number % 2 else "one file"])
        assert_tidy(folder, 3)
        if not faults.name:
            break
    else:
        pytest.fail("no end of operations")
    assert seen == sorted(seen) and set(seen) == {0 if old is None else 1, 2}  # one commit


@pytest.mark.parametrize(("old", "new"), in_thirds(QUICK, SLOW, CHANGES), ids=str)
def test_without_links_each_reader_still_finds_the_numbers_of_one_checkpoint(
    old: str | None, new: str, tmp_path: Path
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    for number in range(1, 1000):
        folder = tmp_path / str(number)
        made(folder, old)
        faults = Faults(number, Killed, dead=True)
        with mock.patch.object(os, "symlink", no_links), mock.patch.object(os, "link", no_links):
            try:
                with faults():
                    save_weights(Versioned(2), folder, file_bytes=FORMS[new])
            except Killed:
                pass
            for reader in (single_first, index_first, ours):
                assert version_of(reader, folder) in ((0, 1, 2) if old is None else (1, 2))
            save_weights(Versioned(3), folder, file_bytes=FORMS[new])
        assert_tidy(folder, 3)
        if not faults.name:
            return


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("old", "new"), in_thirds(QUICK, SLOW, CHANGES), ids=str)
@pytest.mark.parametrize("dead", [False, True], ids=["once", "for good"])
def test_a_failed_operation_is_a_finding_and_the_old_checkpoint_stays(
    old: str | None, new: str, dead: bool, tmp_path: Path
) -> None:
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        made(folder, old)
        faults = Faults(number, lambda: OSError(errno.ENOSPC, "No space left on device"), dead)
        failed = ""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with faults():
                    save_weights(Versioned(2), folder, file_bytes=FORMS[new])
            except CheckpointError as error:
                failed = str(error)
        where = f"operation {number}, {faults.name}, {failed or 'saved'}"
        found = set(versions(folder).values())
        assert found == ({0 if old is None else 1} if failed else {2}), f"{where}: {found}"
        if failed:
            assert "TP121" in failed and "No space left on device" in failed and "make room" in failed
        elif list(folder.glob(".tpplan-*")):
            assert any("couldn't be removed" in str(held.message) for held in warned), where
        if failed and not dead and old is not None:
            assert_tidy(folder, 1)
        if not faults.name:
            return
    pytest.fail("no end of operations")


def test_a_link_into_a_cache_is_replaced_and_the_cache_stays(tmp_path: Path) -> None:
    cache, folder = tmp_path / "blobs", tmp_path / "snapshot"
    made(cache, "one file")
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for name in (SINGLE, "config.json"):
        (folder / name).symlink_to(f"../blobs/{name}")
    faults = Faults(10**9, Killed, dead=True)
    for number in range(1, 1000):
        faults = Faults(number, Killed, dead=True)
        try:
            with faults():
                save_weights(Versioned(2), folder, file_bytes=FORMS["index"])
        except Killed:
            pass
        assert len(set(versions(folder).values())) == 1
        if 2 in versions(folder).values():
            break
    save_weights(Versioned(2), folder)
    assert_tidy(folder, 2)
    assert_tidy(cache, 1)


def test_files_of_others_stay(tmp_path: Path) -> None:
    made(tmp_path / "a", "index")
    strangers = ["model-00001-of-00009.safetensors", "adapter.safetensors", "part-00000.safetensors", ".hidden"]
    for name in strangers:
        (tmp_path / "a" / name).write_bytes(b"")
    save_weights(Versioned(2), tmp_path / "a", file_bytes=FORMS["index"])
    save_weights(Versioned(2), tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {*strangers, SINGLE, "config.json", "tokenizer.json"}


@pytest.mark.parametrize("name", ["../kept.safetensors", "notes.txt", SINGLE])
def test_an_index_that_lies_deletes_nothing_else(name: str, tmp_path: Path) -> None:
    made(tmp_path / "a", "index")
    (tmp_path / "kept.safetensors").write_bytes(b"")
    (tmp_path / "a" / "notes.txt").write_bytes(b"")
    index = tmp_path / "a" / INDEX
    table = json.loads(index.read_text())
    table["weight_map"]["more"] = name
    index.write_text(json.dumps(table))
    save_weights(Versioned(2), tmp_path / "a")
    assert (tmp_path / "kept.safetensors").exists() and (tmp_path / "a" / "notes.txt").exists()
    assert set(versions(tmp_path / "a").values()) == {2}


def test_a_broken_index_is_replaced(tmp_path: Path) -> None:
    for number, text in enumerate(["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}']):
        made(tmp_path / str(number), None)
        (tmp_path / str(number) / INDEX).write_text(text)
        save_weights(Versioned(2), tmp_path / str(number), file_bytes=FORMS["one file" if number % 2 else "index"])
        assert_tidy(tmp_path / str(number), 2)

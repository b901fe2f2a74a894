"""What can be wrong with a checkpoint: one clear TP121 for each, and the model as it was."""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tpplan
from tpplan.checkpoint.files import INDEX, SINGLE, CheckpointError

PARTS = ("part-1.safetensors", "part-2.safetensors")


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6, dtype=dtype), nn.Linear(6, 2, dtype=dtype)
        self.register_buffer("count", torch.tensor(7))


def state() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {**Model().state_dict(), "count": torch.tensor(3)}


def write_parts(folder: Path, index: Any = None) -> dict[str, str]:
    """The checkpoint in two files with an index; returns its table."""
    held = state()
    table: dict[str, str] = {}
    for part, file in zip(("first", "last"), PARTS, strict=True):
        names = [name for name in held if name.startswith(part) or (part == "last" and name == "count")]
        save_file({name: held[name] for name in names}, folder / file)
        table |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": table} if index is None else index))
    return table


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(source: Any, model: nn.Module | None = None, **options: Any) -> str:
    """What is said of a checkpoint that must be refused, with the model as it was."""
    model = model or Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        tpplan.load_weights(model, source, **options)
    assert {found.code for found in caught.value.diagnostics} == {"TP121"}
    assert all(found.help for found in caught.value.diagnostics)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    return str(caught.value)


def test_a_checkpoint_of_several_files_loads(tmp_path: Path) -> None:
    write_parts(tmp_path)
    for source in (tmp_path, str(tmp_path), tmp_path / INDEX):
        model = Model()
        tpplan.load_weights(model, source)
        assert all(torch.equal(tensor, state()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_a_truncated_file_among_several_is_named(tmp_path: Path, left: int) -> None:
    write_parts(tmp_path)
    path = tmp_path / PARTS[1]
    data = path.read_bytes()
    path.write_bytes(data[:left])
    text = refused(tmp_path)
    assert PARTS[1] in text and PARTS[0] not in text
    expected = {0: "it is empty", 5: "5 bytes", 40: "promise a header", -1: f"the file has {len(data) - 1}: it was cut"}
    assert expected[left] in text


def test_all_broken_files_are_reported_at_once(tmp_path: Path) -> None:
    write_parts(tmp_path)
    for file in PARTS:
        (tmp_path / file).write_bytes(b"")
    text = refused(tmp_path)
    assert all(file in text for file in PARTS)


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
LIES: dict[str, tuple[bytes, str]] = {
    "no header": (b"no safetensors", "bytes, but the file has 14"),
    "longer than the file": (struct.pack("<Q", 2**63) + b"{}", "promise a header"),
    "not text": (raw(b"\xff\xfe{}"), "isn't text in UTF-8"),
    "not JSON": (raw(b"{"), "isn't JSON"),
    "not JSON's NaN": (raw(b'{"a": NaN}'), "NaN, which isn't JSON"),
    "a list": (raw([]), "it is a list, not an object"),
    "null": (raw(None), "it is null, not an object"),
    "deep": (raw(b"[" * 100_000), "nested too deeply"),
    "an entry is a number": (raw({"a": 5}), "`a` is a number, not an object"),
    "metadata is a list": (raw({"__metadata__": []}), "`__metadata__` is a list"),
    "twice": (raw(b'{"a": 1, "a": 2}'), "it has the key `a` twice"),
    "unknown dtype": (raw({"a": F4 | {"dtype": "F31"}}, b"1234"), "the dtype 'F31'"),
    "a dtype that is a list": (raw({"a": F4 | {"dtype": ["F32"]}}, b"1234"), "the dtype ['F32']"),
    "negative size": (raw({"a": F4 | {"shape": [-1]}}, b"1234"), "the shape [-1]"),
    "a size that is true": (raw({"a": F4 | {"shape": [True]}}, b"1234"), "the shape [True]"),
    "other shape": (raw({"a": F4 | {"shape": [2]}}, b"1234"), "shape [2], which is 8 bytes, but its offsets hold 4"),
    "three offsets": (raw({"a": F4 | {"data_offsets": [0, 4, 8]}}, b"1234"), "the offsets [0, 4, 8]"),
    "backwards": (raw({"a": F4 | {"data_offsets": [4, 0]}}, b"1234"), "the offsets [4, 0]"),
    "overlap": (
        raw({"a": F4 | {"shape": [2], "data_offsets": [0, 8]}, "b": F4 | {"data_offsets": [4, 8]}}, b"12345678"),
        "`b` overlaps `a`",
    ),
    "the same bytes": (raw({"a": F4, "b": F4}, b"1234"), "`b` overlaps `a`"),
    "a hole": (raw({"a": F4 | {"data_offsets": [4, 8]}}, b"12345678"), "4 bytes before `a` belong to no tensor"),
    "out of range": (raw({"a": F4}, b"123"), "but the file has"),
    "more bytes": (raw({"a": F4}, b"12345"), "its last 1 bytes belong to no tensor"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n", "git-lfs"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies(tmp_path: Path, name: str) -> None:
    data, expected = LIES[name]
    (tmp_path / SINGLE).write_bytes(data)
    text = refused(tmp_path)
    assert expected in text and str(tmp_path / SINGLE) in text


def test_all_that_is_wrong_with_a_header_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(raw({"a": F4 | {"dtype": "F31"}, "b": F4 | {"shape": "x"}}, b"1234"))
    text = refused(tmp_path)
    assert "'F31'" in text and "'x'" in text


INDEXES: dict[str, tuple[bytes, str]] = {
    "binary": (b"\x80\x04\x95", "isn't text in UTF-8"),
    "empty": (b"", "isn't JSON"),
    "a list": (b"[1]", "it is a list, not an object"),
    "a number": (b"5", "it is a number, not an object"),
    "null": (b"null", "it is null, not an object"),
    "nothing": (b"{}", "it has no `weight_map`"),
    "map is null": (b'{"weight_map": null}', "`weight_map` is null"),
    "map is a list": (b'{"weight_map": ["a"]}', "`weight_map` is a list"),
    "a file is a number": (b'{"weight_map": {"a": 5}}', "a number for `a`"),
    "a file is nothing": (b'{"weight_map": {"a": ""}}', "a string for `a`"),
    "twice": (b'{"weight_map": {"a": "x", "a": "y"}}', "the key `a` twice"),
    "two maps": (b'{"weight_map": {}, "weight_map": {}}', "the key `weight_map` twice"),
    "up": (b'{"weight_map": {"a": "../x.safetensors"}}', "outside of its own folder"),
    "up from below": (b'{"weight_map": {"a": "x/../../x.safetensors"}}', "outside of its own folder"),
    "absolute": (b'{"weight_map": {"a": "/etc/passwd"}}', "outside of its own folder"),
    "absolute on Windows": (b'{"weight_map": {"a": "C:\\\\x.safetensors"}}', "outside of its own folder"),
    "a null byte": (b'{"weight_map": {"a": "x\\u0000"}}', "outside of its own folder"),
    "half a character": (b'{"weight_map": {"a": "\\ud800"}}', "can't be read"),
    "missing": (b'{"weight_map": {"a": "x.safetensors"}}', "files that don't exist: `x.safetensors`"),
    "a folder": (b'{"weight_map": {"a": "."}}', "is no file"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies(tmp_path: Path, name: str) -> None:
    data, expected = INDEXES[name]
    (tmp_path / INDEX).write_bytes(data)
    assert expected in refused(tmp_path)


def test_a_key_in_another_file_than_the_index_says(tmp_path: Path) -> None:
    table = write_parts(tmp_path)
    index = {**table, "first.bias": PARTS[1], "nothing": PARTS[0]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    text = refused(tmp_path)
    assert f"it puts `first.bias` into `{PARTS[1]}`; it is in `{PARTS[0]}`" in text
    assert f"it puts `nothing` into `{PARTS[0]}`; no file that the index names holds it" in text


def test_what_an_index_leaves_out_is_missing(tmp_path: Path) -> None:
    table = write_parts(tmp_path)
    del table["first.bias"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": table}))
    assert "`first.bias` is not in the checkpoint" in refused(tmp_path)


def test_a_missing_file_is_named_with_what_else_is_wrong(tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / PARTS[0]).unlink()
    (tmp_path / PARTS[1]).write_bytes(b"")
    text = refused(tmp_path)
    assert f"files that don't exist: `{PARTS[0]}`" in text and "it is empty" in text


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
MISFITS: dict[str, tuple[Change, str]] = {
    "a key is missing": (lambda s: {n: t for n, t in s.items() if n != "last.bias"}, "`last.bias` is not in the"),
    "a wrong shape": (lambda s: s | {"last.bias": torch.zeros(3)}, "shape [3] there and [2] in the model"),
    "a scalar": (lambda s: s | {"last.bias": torch.zeros(())}, "shape [] there and [2] in the model"),
    "int8": (lambda s: s | {"last.bias": torch.zeros(2, dtype=torch.int8)}, "is I8 there and float32 in the model"),
    "int64": (lambda s: s | {"last.bias": torch.zeros(2, dtype=torch.int64)}, "is I64 there and float32"),
    "bool": (lambda s: s | {"last.bias": torch.zeros(2, dtype=torch.bool)}, "is BOOL there and float32 in the model"),
    "fp8": (lambda s: s | {"last.bias": torch.zeros(2, dtype=torch.float8_e4m3fn)}, "is F8_E4M3 there and float32"),
    "floats for integers": (lambda s: s | {"count": torch.tensor(3.0)}, "`count` is F32 there and int64"),
    "bool for integers": (lambda s: s | {"count": torch.tensor(True)}, "`count` is BOOL there and int64"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit(tmp_path: Path, name: str) -> None:
    change, expected = MISFITS[name]
    save_file(change(state()), tmp_path / SINGLE)
    assert expected in refused(tmp_path)


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    held = state() | {"last.bias": torch.zeros(3), "first.bias": torch.zeros(6, dtype=torch.int8)}
    del held["first.weight"]
    save_file(held, tmp_path / SINGLE)
    text = refused(tmp_path)
    assert "`first.weight` is not in" in text and "shape [3] there" in text and "is I8 there" in text


CASTS = [("float64", "bfloat16"), ("bfloat16", "float64"), ("float16", "float16")]


@pytest.mark.parametrize(("stored", "wanted"), CASTS)
def test_floats_are_cast_as_torch_does(tmp_path: Path, stored: str, wanted: str) -> None:
    held = {n: t.to(getattr(torch, stored)) if t.is_floating_point() else t.int() for n, t in state().items()}
    save_file(held, tmp_path / SINGLE)
    model = Model(getattr(torch, wanted))
    tpplan.load_weights(model, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, held[name].to(tensor.dtype)), name


def test_more_than_the_model_has_is_a_warning(tmp_path: Path) -> None:
    save_file(state() | {"head.weight": torch.zeros(2)}, tmp_path / SINGLE)
    with pytest.warns(UserWarning, match=r"TP121(?s:.*)1 tensors that the model doesn't(?s:.*)`head.weight`"):
        tpplan.load_weights(Model(), tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_a_warning(tmp_path: Path, number: float) -> None:
    held = state()
    held["first.weight"][5, 3] = number
    save_file(held, tmp_path / SINGLE)
    model = Model()
    with pytest.warns(UserWarning, match=r"TP121(?s:.*)NaN or infinite: `first.weight`\n"):
        tpplan.load_weights(model, tmp_path)
    assert torch.equal(model.first.weight.isnan(), held["first.weight"].isnan())


def test_numbers_too_large_for_the_models_dtype_are_a_warning(tmp_path: Path) -> None:
    save_file(state() | {"last.bias": torch.tensor([1e30, 0.0])}, tmp_path / SINGLE)
    with pytest.warns(UserWarning, match="NaN or infinite: `last.bias`"):
        tpplan.load_weights(Model(torch.float16), tmp_path)


def test_large_numbers_are_no_infinities(tmp_path: Path) -> None:
    save_file(state() | {"last.bias": torch.tensor([3e38, 3e38])}, tmp_path / SINGLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpplan.load_weights(Model(), tmp_path)


def _files(*names: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        for name in names:
            (folder / name).write_bytes(b"PK\x03\x04")
        return folder

    return make


PLACES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (lambda folder: folder / "nowhere", "there is no checkpoint at"),
    "an empty folder": (_files(), "has neither model.safetensors nor"),
    "pickles": (_files("pytorch_model.bin"), "holds pickles (`pytorch_model.bin`)"),
    "pickles in parts": (_files("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"), "holds pickles"),
    "a pickle": (lambda folder: _files("model.pt")(folder) / "model.pt", "holds pickles (`model.pt`)"),
    "a distributed checkpoint": (_files(".metadata", "__0_0.distcp"), "torch.distributed.checkpoint"),
    "parts without an index": (_files(*PARTS), "but neither"),
    "another name": (_files("adapter.safetensors"), "name the file itself"),
    "a name of the hub": (lambda folder: "meta-llama/Llama-3.2-1B", "hf download meta-llama/Llama-3.2-1B"),
    "a null byte": (lambda folder: "a\0b", "no checkpoint at"),
    "no file": (lambda folder: "/dev/null", "neither a file nor a folder"),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    make, expected = PLACES[name]
    assert expected in refused(make(tmp_path))


@pytest.mark.parametrize("file", [INDEX, PARTS[1], ""])
def test_permission_denied(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path)
    if os.geteuid():
        (tmp_path / file).chmod(0)
    else:  # who may read everything
        _deny(monkeypatch, tmp_path / file)
    text = refused(tmp_path)
    assert f"`{tmp_path / file}` can't be read: permission denied" in text


def _deny(monkeypatch: pytest.MonkeyPatch, denied: Path) -> None:
    import builtins
    import io

    for module, name in ((builtins, "open"), (io, "open"), (os, "listdir"), (os, "stat")):
        stock = getattr(module, name)

        def refusing(path: Any, *rest: Any, stock: Any = stock, name: str = name, **more: Any) -> Any:
            inside = denied.suffix == "" and Path(str(path)).parent == denied and name == "stat"
            if inside or (str(path) == str(denied) and (name != "stat")):
                raise PermissionError(13, "Permission denied", str(path))
            return stock(path, *rest, **more)

        monkeypatch.setattr(module, name, refusing)


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(state(), tmp_path / SINGLE)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    model = Model()
    with pytest.raises(CheckpointError, match=r"become shorter(?s:.*)loaded in part"):
        tpplan.load_weights(model, tmp_path)
    with torch.device("meta"):
        model = Model()
    with pytest.raises(CheckpointError, match="become shorter") as caught:
        tpplan.load_weights(model, tmp_path)
    assert "in part" not in str(caught.value) and all(t.is_meta for t in model.state_dict().values())


def test_an_older_checkpoint_may_have_buffers_that_are_no_longer_saved(tmp_path: Path) -> None:
    model = Model()
    model.register_buffer("table", torch.ones(3), persistent=False)
    save_file(state() | {"table": torch.zeros(5)}, tmp_path / SINGLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpplan.load_weights(model, tmp_path)
    assert torch.equal(dict(model.named_buffers())["table"], torch.ones(3))


def test_a_link_may_lead_out_of_the_folder(tmp_path: Path) -> None:
    """As in the hub's cache, whose snapshots are links to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(state(), tmp_path / "blobs" / "4d7a")
    (tmp_path / "snapshot" / SINGLE).symlink_to("../blobs/4d7a")
    tpplan.load_weights(Model(), tmp_path / "snapshot")
    assert load_file(tmp_path / "snapshot" / SINGLE)

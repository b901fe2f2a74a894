"""GPUs and links: built in, from a file, and what is said of a file with mistakes."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from tpplan.cli.main import main
from tpplan.cost.cluster import built_in, cluster_of
from tpplan.cost.cost_errors import CostError
from tpplan.plan import PlanError

OURS = "like: a100\ntitle: ours\nin_node: 4\nnetwork: 12.5e9\nefficiency:\n  all-reduce: [0.5, 0.6, 0.6]\n"


def test_built_in_ones_are_complete() -> None:
    assert list(built_in()) == ["h100", "h100-pcie", "h200", "a100", "b200"]
    for name in built_in():
        cluster = cluster_of(name)
        assert cluster.name == name and cluster.guesses
        assert cluster.flops["bfloat16"] > cluster.flops["float32"]
        assert cluster.assumptions["latency"] == {k: list(v) for k, v in cluster.latency.items()}
        assert cluster_of(cluster) is cluster


def test_a_file_says_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(OURS, encoding="utf-8")
    ours, base = cluster_of(path), cluster_of("a100")
    assert (ours.name, ours.title, ours.in_node, ours.network) == ("ours", "ours", 4, 12.5e9)
    assert ours.efficiency["all-reduce"] == (0.5, 0.6, 0.6)
    assert ours.efficiency["all-gather"] == base.efficiency["all-gather"] and ours.memory == base.memory


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        ("like: h1000\n", "`h1000` isn't built in", ":1:7"),
        ("lik: h100\n", "`lik` isn't a key of a topology", ":1:1"),
        ("network: 100 Gb/s\n", "`network` has to be a number above 0, and is the text `100 Gb/s`", ":1:10"),
        ("in_node: 0\n", "`in_node` has to be a whole number above 0", ":1:10"),
        ("in_node: 3.5\n", "`in_node` has to be a whole number above 0", ":1:10"),
        ("memory: 8.0e+999\n", "`memory` has to be a whole number above 0", ":1:9"),
        ("efficiency:\n  all-reduce: [0.5, 1.5, 0.7]\n", "has to be a list of three shares between 0 and 1", ":2:15"),
        ("usable: 1.5\n", "`usable` has to be a share between 0 and 1", ":1:9"),
        ("flops:\n  bf16: 1e15\n", "`bf16` isn't a key of `flops`", ":2:3"),
        ("flops:\n  fp8: much\n", "`fp8` has to be FLOPs a second", ":2:8"),
        ("latency: 3\n", "`latency` has to be a mapping", ":1:10"),
        ("latency:\n  all-reduce: [1e-6, 2e-6]\n", "`all-reduce` has to be a list of three numbers", ":2:15"),
        ("- h100\n", "a topology has to be a mapping", ":1:1"),
        ("", "a topology has to be a mapping", ":1:1"),
        ("# none\n", "a topology has to be a mapping", ":1:1"),
        ("like:\n", "`like` has to be a GPU's name, and is nothing", ":2:1"),
        ("like: {a100: 1}\n", "`like` has to be a GPU's name, and is a mapping", ":1:7"),
        ("title: [ours]\n", "`title` has to be a text, and is a list", ":1:8"),
        ("flops:\n  fp8: -1\n", "`fp8` has to be FLOPs a second, and is the number -1", ":2:8"),
        ("like: [h100\n", "expected ',' or ']'", ":2:1"),
        ("like: h100\nlike: a100\n", "`like` appears twice", ":2:1"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(tmp_path: Path, text: str, message: str, place: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        cluster_of(path)
    (found,) = caught.value.diagnostics
    assert found.code == "TP221" and message in found.message and found.help
    assert str(found.span or "").endswith(place)


def test_mistakes_are_told_together_and_with_their_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("memory: 80GiB\nnetwork: 100 Gb/s\nkernel: 2 us\nlike: h1000\n", encoding="utf-8")
    assert main(["advise", "--model", "hf:llama", "--gpus", "2", "--topology", str(path)]) == 2
    told = capsys.readouterr().err
    assert "Found 4 errors" in told and all(f"ours.yaml:{line}:" in told for line in range(1, 5))
    assert all(f"write {unit}, such as `" in told for unit in ("bytes", "bytes a second", "seconds"))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "is a folder, not a topology file"),
        ("x" * 300 + ".yaml", "can't be read: File name too long"),
        ("closed.yaml", "can't be read: Permission denied"),
        ("none.yaml", "there is no topology file"),
    ],
)
def test_what_is_no_file_to_read_is_told(tmp_path: Path, name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if name == "closed.yaml":  # root may read everything
        (tmp_path / name).touch()
        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CostError, match=told) as caught:
        cluster_of(tmp_path / name)
    assert caught.value.code == "TP220"


def test_an_unknown_gpu_is_told_with_those_that_are_known() -> None:
    with pytest.raises(CostError, match="h100, h100-pcie, h200, a100, b200") as caught:
        cluster_of("H100")
    assert caught.value.code == "TP220" and "did you mean `h100`" in str(caught.value)


def test_they_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster_of("h100").link = 1.0  # type: ignore[misc]

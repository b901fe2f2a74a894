"""From which size on `auto` takes a kernel: what was measured on this device, and otherwise a guess that says so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tpplan import kernels
from tpplan.kernels import backend, measured, thresholds
from tpplan.kernels.measured import Measured, MeasuredSetting, file_of, write_measured
from tpplan.kernels.thresholds import CASES, minimum_elements, origin

HERE = MeasuredSetting("NVIDIA H100 80GB HBM3", "2.11.0+cu130", "3.6.0")
ROW: dict[str, int | None] = dict(zip(CASES, (10, 2000, 0, None), strict=True))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv(measured.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "setting_of", lambda device: HERE)
    thresholds.forget_measured()
    yield tmp_path
    thresholds.forget_measured()


def found(kernel: Any = "gelu") -> list[int]:
    return [minimum_elements(kernel, wide, gradients, None) for wide in (False, True) for gradients in (False, True)]


def test_until_it_is_measured_a_threshold_is_a_guess_and_says_so() -> None:
    assert found() == [1 << 20] * 4 and found("swiglu") == [0] * 4
    assert origin("gelu") == "a guess"


def test_what_was_measured_holds_by_width_and_gradients_and_says_where_and_when(cache: Path) -> None:
    file = write_measured(Measured(HERE, "2026-11-27", {"gelu": ROW}))
    assert file.parent.parent.parent == cache
    assert file.name == "NVIDIA-H100-80GB-HBM3-torch-2.11.0+cu130-triton-3.6.0.json"
    assert found()[:3] == [10, 2000, 0] and found()[3] > 1 << 60
    assert origin("gelu") == "measured on NVIDIA H100 80GB HBM3, 2026-11-27"
    assert origin("swiglu") == "a guess" and found("swiglu") == [0] * 4
    texts = [thresholds.elements_text(least) for least in found()]
    assert texts == ["from 10 elements on", "from 2,000 elements on", "at any size", "never"]
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("other", [{"device": "NVIDIA A100"}, {"torch": "2.13.0"}, {"triton": "3.7.0"}])
def test_what_was_measured_elsewhere_is_another_file(other: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"device": HERE.device, "torch": HERE.torch, "triton": HERE.triton}
    write_measured(Measured(MeasuredSetting(**values | other), "2026-11-27", {"gelu": ROW}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() == [1 << 20] * 4
    monkeypatch.setattr(measured, "setting_of", lambda device: MeasuredSetting(**values | other))
    thresholds.forget_measured()
    assert found()[0] == 10


BROKEN: dict[str, Any] = {
    "no JSON": "{",
    "no text": b"\xff\xfe\x00",
    "a list": [],
    "nested beyond measure": "[" * 100_000,
    "no elements": {"elements": None},
    "no date": {"date": 7},
    "another device": {"device": "NVIDIA A100"},
    "another torch": {"torch": "2.13.0"},
    "no row": {"elements": {"gelu": 3}},
    "a missing case": {"elements": {"gelu": {"16-bit step": 3}}},
    "a negative size": {"elements": {"gelu": ROW | {"16-bit step": -1}}},
    "a truth": {"elements": {"gelu": ROW | {"16-bit step": True}}},
    "a text": {"elements": {"gelu": ROW | {"16-bit step": "7"}}},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_or_foreign_file_is_a_warning_and_the_guess_stays(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.json"
    monkeypatch.setenv(measured.VARIABLE, str(file))
    assert write_measured(Measured(HERE, "2026-11-27", {"gelu": ROW})) == file_of(HERE) == file
    content = BROKEN[broken]
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content)
    file.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    with pytest.warns(UserWarning, match=r"mine\.json: not used.*guesses"):
        assert found() == [1 << 20] * 4
    assert origin("gelu") == "a guess"  # and no second warning


def test_a_folder_in_the_file_s_place_is_a_warning(cache: Path) -> None:
    file_of(HERE).mkdir(parents=True)
    with pytest.warns(UserWarning, match="not used"):
        assert found() == [1 << 20] * 4


def test_a_kernel_of_another_version_is_passed_over(recwarn: pytest.WarningsRecorder) -> None:
    write_measured(Measured(HERE, "2026-11-27", {"conv": {"any": -7}, "gelu": ROW}))
    assert found()[0] == 10 and not list(recwarn)


def test_without_a_gpu_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    write_measured(Measured(HERE, "2026-11-27", {"gelu": ROW}))
    monkeypatch.setattr(measured, "setting_of", lambda device: None)
    assert found() == [1 << 20] * 4


def test_a_relative_cache_folder_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(file_of(HERE)).startswith("/somewhere/.cache/tpplan/kernels/")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but on CPU tensors: the kernels' operators run the formulas."""
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "runs_kernels", lambda tensor: True)
    never: dict[str, int | None] = dict.fromkeys(CASES)
    write_measured(Measured(HERE, "2026-11-27", {"gelu": ROW, "rms_norm": ROW, "rms_norm_variant": never}))


def nodes(function: Any, x: torch.Tensor) -> list[str]:
    taken: list[str] = []

    def backend_of(graph: Any, inputs: Any) -> Any:
        taken.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend_of, fullgraph=True)(x)
    return taken


@pytest.mark.usefixtures("on_a_gpu")
def test_a_compiled_graph_takes_what_was_measured_and_doesn_t_break() -> None:
    small, large = torch.randn(8, 8), torch.randn(8, 256)
    for x, kernel_without, kernel_with in ((small, True, False), (large, True, True)):
        for enabled, expected in ((False, kernel_without), (True, kernel_with)):
            with torch.set_grad_enabled(enabled):
                taken = nodes(lambda x: kernels.gelu(x.bfloat16()), x)
            assert any("tpplan" in name for name in taken) == expected, (x.shape, enabled, taken)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_variant_that_torch_composes_has_a_threshold_of_its_own() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert any("tpplan" in name for name in nodes(lambda x: kernels.rms_norm(x, (64,)), x))
        assert not any("tpplan" in name for name in nodes(lambda x: kernels.rms_norm(x, (64,), cast="before"), x))


@pytest.mark.usefixtures("on_a_gpu")
def test_choose_gives_the_size_and_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "TRITON_INSTALLED", True)
    found = kernels.choose("gelu", "cuda", torch.bfloat16, 1999, gradients=True)
    assert found.name == "torch"
    assert found.reason == (
        "of 1,999 elements; it pays from 2,000 elements on (measured on NVIDIA H100 80GB HBM3, 2026-11-27)"
    )
    assert kernels.choose("gelu", "cuda", torch.bfloat16, 1999, gradients=False).name == "triton"
    with torch.no_grad():
        assert kernels.choose("gelu", "cuda", torch.bfloat16, 1999).name == "triton"
    never = kernels.choose("gelu", "cuda", elements=1 << 40, gradients=True)
    assert never.reason.startswith("of 1,099,511,627,776 elements; it pays never (")
    assert kernels.choose("gelu", "cuda", elements=1, backend="triton").name == "triton"


def test_torch_s_own_operator_is_what_a_size_below_takes() -> None:
    x = torch.randn(3, 8)
    torch.testing.assert_close(kernels.gelu(x), functional.gelu(x))

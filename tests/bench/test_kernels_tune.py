"""The search for the sizes from which kernels pay: from the largest down, in the face of noise, memory and failures."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tpplan.bench import kernels_tune
from tpplan.bench.kernels_tune import measured_elements, sizes_of, speed_up, text_of_thresholds, threshold, tune
from tpplan.cli.main import main
from tpplan.kernels import measured, thresholds
from tpplan.kernels.measured import MeasuredSetting
from tpplan.kernels.thresholds import CASES, KERNELS, Kernel

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize(("least", "expected"), [(1, 0), (2, 2), (3, 4), (16, 16), (17, None)])
def test_the_threshold_is_the_least_size_from_which_on_all_win(least: int, expected: int | None) -> None:
    assert threshold(SIZES, lambda size: size >= least) == expected


def test_a_size_that_wins_below_one_that_loses_doesn_t_count() -> None:
    asked: list[int] = []
    assert threshold(SIZES, lambda size: (asked.append(size), size != 4)[1]) == 8
    assert asked == [16, 8, 4]


def test_what_is_too_large_for_the_device_is_left_out() -> None:
    assert threshold(SIZES, lambda size: None if size > 4 else size >= 2) == 2
    assert threshold(SIZES, lambda size: None) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_sizes_are_whole_rows_up_to_a_gigabyte(kernel: Kernel) -> None:
    sizes = sizes_of(kernel)
    columns = 32_768 if kernel == "cross_entropy" else 4_096
    assert all(size % columns == 0 for size in sizes) and sizes[-1] == 1 << 28
    assert all(b == 2 * a for a, b in itertools.pairwise(sizes))


def test_each_case_has_a_threshold_and_a_loss_is_measured_twice() -> None:
    seen: dict[tuple[str, int], int] = {}

    def contest(kernel: Kernel, case: str, elements: int) -> float:
        times = seen[case, elements] = seen.get((case, elements), 0) + 1
        disturbed = elements == 1 << 25 and times == 1
        least = 1 << {"16-bit forward": 22, "16-bit step": 26}.get(case, 40)
        return 1.1 if elements >= least and not disturbed else 0.9

    notes: list[str] = []
    found = measured_elements("gelu", contest, notes.append)
    assert found == {"16-bit forward": 1 << 22, "16-bit step": 1 << 26, "32-bit forward": None, "32-bit step": None}
    assert seen["16-bit forward", 1 << 25] == 2 and seen["16-bit forward", 1 << 24] == 1 and not notes


def test_memory_that_runs_out_leaves_the_smaller_sizes() -> None:
    def contest(kernel: Kernel, case: str, elements: int) -> float:
        if elements > 1 << 20:
            raise torch.OutOfMemoryError("full")
        return 2.0

    assert set(measured_elements("swiglu", contest, pytest.fail).values()) == {0}


def test_a_kernel_that_fails_is_never_taken_and_noted() -> None:
    def contest(kernel: Kernel, case: str, elements: int) -> float:
        raise RuntimeError("no such instruction")

    notes: list[str] = []
    assert set(measured_elements("swiglu", contest, notes.append).values()) == {None}
    assert notes[0] == "swiglu, 16-bit forward: RuntimeError: no such instruction"


def _clock(kernel: float, other: float, noise: dict[int, float]) -> Any:
    """A timer of two calls; the round in `noise` takes so many times as long."""
    asked = iter(range(1000))

    def timer(call: Any, calls: int) -> float:
        assert calls >= 1
        return (kernel if call is _OURS else other) * noise.get(next(asked), 1.0)

    return timer


def _OURS() -> None: ...


def _OTHERS() -> None: ...


@pytest.mark.parametrize("noise", [{}, {2: 50.0}, {2: 50.0, 5: 9.0, 9: 20.0}, {3: 80.0, 10: 80.0}])
def test_rounds_that_were_disturbed_don_t_count(noise: dict[int, float]) -> None:
    assert speed_up(_OURS, _OTHERS, _clock(100.0, 120.0, noise)) == pytest.approx(1.2)


def test_a_drift_of_the_clock_meets_both_alike() -> None:
    drift = {number: 1.0 + number / 10 for number in range(100)}
    assert speed_up(_OURS, _OTHERS, _clock(100.0, 100.0, drift)) == pytest.approx(1.0, abs=0.005)


def test_each_is_timed_on_the_gpu_with_all_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors: each kernel's contest runs, forward and step, and compares it with torch's own."""
    made = kernels_tune.tensors_of
    monkeypatch.setattr(
        kernels_tune,
        "tensors_of",
        lambda subject, rows, columns, dtype, device: made(subject, rows, columns, dtype, "cpu"),
    )
    monkeypatch.setattr(kernels_tune, "wall_microseconds", lambda call, device, calls: (call(), 5.0)[1])
    monkeypatch.setattr(kernels_tune, "_columns", lambda kernel: 8)
    for kernel in KERNELS:
        assert [kernels_tune.contest(kernel, case, 32) for case in CASES] == [1.0] * 4


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasuredSetting:
    setting = MeasuredSetting("NVIDIA H100 80GB HBM3", "2.11.0", "3.6.0")
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "found.json"))
    monkeypatch.setattr(measured, "setting_of", lambda device: setting)
    monkeypatch.setattr(kernels_tune, "_setting", lambda: setting)
    monkeypatch.setattr(kernels_tune, "contest", lambda kernel, case, size: 1.1 if size >= 1 << 24 else 0.9)
    thresholds.forget_measured()
    return setting


@pytest.mark.usefixtures("on_a_gpu")
def test_the_command_measures_all_keeps_it_and_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["bench", "kernels", "--tune"]) == 0
        assert thresholds.minimum_elements("gelu", False, True, None) == 1 << 24
        assert thresholds.origin("cross_entropy").startswith("measured on NVIDIA H100")
    finally:
        thresholds.forget_measured()
    shown = capsys.readouterr()
    assert "found.json" in shown.err
    assert all(f"\n{kernel} " in shown.out for kernel in KERNELS) and "16,777,216" in shown.out


@pytest.mark.usefixtures("on_a_gpu")
def test_where_nothing_can_be_written_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "file" / "found.json"))
    assert main(["bench", "kernels", "--tune"]) == 2
    shown = capsys.readouterr().err
    assert "can't be written to" in shown and measured.VARIABLE in shown and "gelu" not in shown


def test_what_is_shown_has_a_line_for_each_kernel(on_a_gpu: MeasuredSetting) -> None:
    row: dict[str, int | None] = dict(zip(CASES, (0, None, 4096, 1 << 20), strict=True))
    text = text_of_thresholds(measured.Measured(on_a_gpu, "2026-11-27", {"gelu": row}))
    assert text.splitlines()[-1].split() == ["gelu", "0", "never", "4,096", "1,048,576"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(kernels_tune.BenchmarkError, match="measured on a GPU"):
        tune()
    assert main(["bench", "kernels", "--tune"]) == 2
    assert "thresholds are measured on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["kernels"], ["--tune"], ["overhead", "--tune"], ["kernels", "overhead", "--tune"]]
)
def test_tune_is_of_kernels_alone(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert "--tune" in capsys.readouterr().err

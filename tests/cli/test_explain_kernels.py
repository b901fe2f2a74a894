"""What `tpplan explain` says of the sizes from which kernels pay: measured on this device, or a guess."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tpplan import kernels
from tpplan.cli.explain_kernels import tell_of_kernels, where_it_pays
from tpplan.cli.main import main
from tpplan.compiler.ir.program import KernelUse
from tpplan.kernels import measured, thresholds
from tpplan.kernels.measured import Measured, MeasuredSetting, write_measured
from tpplan.kernels.thresholds import CASES

NORM = KernelUse("norm", "rms_norm", "auto", "bfloat16", cast="before")
GELU = KernelUse("act", "gelu", "auto", "float32", approximate="tanh")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuredSetting]:
    setting = MeasuredSetting("NVIDIA H100", "2.11.0", "3.6.0")
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "found.json"))
    monkeypatch.setattr(measured, "setting_of", lambda device: setting)
    thresholds.forget_measured()
    yield setting
    thresholds.forget_measured()


def test_a_guess_is_called_one() -> None:
    assert where_it_pays(NORM) == "at any size (a guess)"
    assert where_it_pays(GELU) == "from 1,048,576 elements on (a guess)"


def test_what_was_measured_says_where_and_when_by_dtype_and_variant(here: MeasuredSetting) -> None:
    row: dict[str, int | None] = dict(zip(CASES, (4096, 8192, 16384, None), strict=True))
    never: dict[str, int | None] = dict.fromkeys(CASES)
    write_measured(Measured(here, "2026-11-27", {"rms_norm_variant": row, "gelu": row, "rms_norm": never}))
    told = "(measured on NVIDIA H100, 2026-11-27)"
    assert where_it_pays(NORM) == f"from 4,096 elements on, with a backward from 8,192 elements on {told}"
    assert where_it_pays(GELU) == f"from 16,384 elements on, with a backward never {told}"


def test_the_table_and_a_word_below_it_say_that_sizes_are_guesses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(kernels, "available", lambda device: kernels.Backend("triton", "for the test"))
    sizes = ("hidden_size=32", "intermediate_size=64", "num_attention_heads=4", "num_hidden_layers=1", "vocab_size=64")
    options = [part for size in (*sizes, "num_key_value_heads=4") for part in ("--set", size)]
    assert main(["explain", "llama", "--model", "hf:llama", "--tp", "2", *options]) == 0
    shown = capsys.readouterr()
    assert "on a GPU, at any size (a guess)" in shown.out
    assert shown.err == "Sizes from which kernels pay are guesses: `tpplan bench kernels --tune` measures them.\n"


def test_nothing_is_said_where_no_kernel_fits(capsys: pytest.CaptureFixture[str]) -> None:
    class Empty:
        kernels = (KernelUse("norm", "rms_norm", "auto", "float32", refused="it normalizes over the sharded dim"),)

    tell_of_kernels(Empty())  # pyright: ignore[reportArgumentType]
    assert capsys.readouterr().err == ""

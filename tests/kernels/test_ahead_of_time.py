"""What the compiler makes of the kernels for a Hopper GPU: no spills, 16-byte loads and stores, no double precision."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tpplan.kernels.launch import MAX_BACKWARD_COLUMNS, MAX_FORWARD_COLUMNS, Tile, pointwise_tile, row_tile

pytest.importorskip("triton")

from tests.kernels.ahead_of_time import CUOBJDUMP, Binary, compile_for_hopper
from tests.marking import sweep_but
from tpplan.kernels.backend import INTERPRETED

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not CUOBJDUMP.is_file(), reason="this triton comes without cuobjdump"),
]

FLOAT, STRIDE = "*fp32", "i32"
POINTERS = {"bf16": "*bf16", "fp32": "*fp32"}


def sizes(tile: Tile) -> dict[str, int]:
    return {"BLOCK_ROWS": tile.rows, "BLOCK_COLUMNS": tile.columns}


def norm_forward(hidden: int, kind: str, centred: bool = True, residual: bool = True) -> Binary:
    from tpplan.kernels import norm_forward_kernel as module

    tile = row_tile(hidden, MAX_FORWARD_COLUMNS)
    kernel = module.norm_forward_looped_kernel if tile.looped else module.norm_forward_kernel
    p, added = POINTERS[kind], POINTERS[kind] if residual else None
    types = {
        **{"x_ptr": p, "residual_ptr": added, "sum_ptr": added, "y_ptr": p},
        **{"mean_ptr": FLOAT if centred else None, "rstd_ptr": FLOAT, "weight_ptr": p, "bias_ptr": p},
        **{"x_stride": STRIDE, "residual_stride": STRIDE, "rows": "i32", "eps": "fp32", "offset": "fp32"},
    }
    constants = {"HIDDEN": hidden, "CENTRED": centred, "ROUND_DTYPE": None, **sizes(tile)}
    return compile_for_hopper(kernel, types, constants, tile.warps)


def norm_backward(hidden: int, kind: str, centred: bool = True, residual: bool = True) -> Binary:
    from tpplan.kernels import norm_backward_kernel as module

    tile = row_tile(hidden, MAX_BACKWARD_COLUMNS)
    kernel = module.norm_backward_looped_kernel if tile.looped else module.norm_backward_kernel
    p = POINTERS[kind]
    types = {
        **{"dy_ptr": p, "dsum_ptr": p if residual else None, "x_ptr": p, "weight_ptr": p, "dx_ptr": p},
        **{"mean_ptr": FLOAT if centred else None, "rstd_ptr": FLOAT, "partial_ptr": FLOAT},
        **{"dots_ptr": FLOAT if tile.looped else None, "rows": "i32", "offset": "fp32"},
        **{"dy_stride": STRIDE, "dsum_stride": STRIDE, "x_stride": STRIDE},
    }
    constants = {"HIDDEN": hidden, "CENTRED": centred, "ROUND_DTYPE": None, "SUMS": 1 + centred, **sizes(tile)}
    return compile_for_hopper(kernel, types, constants, tile.warps)


def activation(name: str, kind: str, form: str) -> Binary:
    from tpplan.kernels import activation_kernel as module

    tile, p = pointwise_tile(4096), POINTERS[kind]
    up, bias = (p, None) if form == "silu" else (None, p)
    strides = {"x_stride": STRIDE, "rows": "i32", "columns": "i32"}
    types: dict[str, dict[str, str | None]] = {
        "activation_forward_kernel": {"x_ptr": p, "up_ptr": up, "bias_ptr": bias, "y_ptr": p, "up_stride": STRIDE},
        "activation_backward_kernel": {
            **{"dy_ptr": p, "x_ptr": p, "up_ptr": up, "dx_ptr": p, "dup_ptr": up},
            **{"dy_stride": STRIDE, "up_stride": STRIDE},
        },
        "bias_activation_backward_kernel": {
            **{"dy_ptr": p, "x_ptr": p, "bias_ptr": p, "dx_ptr": p, "partial_ptr": FLOAT, "dy_stride": STRIDE}
        },
    }
    constants = {"KIND": form, **sizes(tile)}
    return compile_for_hopper(getattr(module, name), types[name] | strides, constants, tile.warps)


def cross_entropy(name: str, kind: str) -> Binary:
    from tpplan.kernels import cross_entropy_kernel as module

    p = POINTERS[kind]
    rows = dict.fromkeys(("highest_ptr", "logsum_ptr"), FLOAT)
    types: dict[str, Any] = {"logits_ptr": p, "target_ptr": "*i64", **rows, "stride": STRIDE, "columns": "i32"}
    types |= {"first": "i32", "ignore_index": "i32"}
    if name == "cross_entropy_forward_kernel":
        types |= {"picked_ptr": FLOAT, "total_ptr": FLOAT, "classes": "i32"}
    else:
        types |= {"dlogsum_ptr": FLOAT, "dpicked_ptr": FLOAT, "dtotal_ptr": FLOAT, "dlogits_ptr": p}
    return compile_for_hopper(getattr(module, name), types, {"SUM_LOGITS": False, "BLOCK": 4096}, 8)


def assert_good(binary: Binary) -> None:
    assert (binary.stack, binary.local) == (0, 0), f"spills: {binary.stack} + {binary.local} bytes"
    assert re.search(r"ld\.global\S*\.v4", binary.ptx)
    assert re.search(r"st\.global\S*\.v4", binary.ptx)
    assert not re.search(r"\.f64\b", binary.ptx)
    assert not re.search(r"\b(atom|red)\.", binary.ptx)


@pytest.mark.parametrize("kind", POINTERS)
@pytest.mark.parametrize("hidden", [1024, 8192, 32_768])
@pytest.mark.one_in(3)
def test_norms_spill_nothing_and_load_16_bytes_at_a_time(hidden: int, kind: str) -> None:
    assert_good(norm_forward(hidden, kind))
    assert_good(norm_backward(hidden, kind))


WIDTHS = (64, 768, 2048, 5120, 7168, 12_288, 16_384, 65_536)
FORMS = [*itertools.product(POINTERS, [True, False], [True, False])]
IN_TURNS = [(hidden, *FORMS[(turn + more) % len(FORMS)]) for turn, hidden in enumerate(WIDTHS) for more in (0, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "kind", "residual", "centred"),
    sweep_but(IN_TURNS, [(hidden, *form) for hidden in WIDTHS for form in FORMS]),
)
def test_every_form_of_norm_spills_nothing(hidden: int, kind: str, residual: bool, centred: bool) -> None:
    assert_good(norm_forward(hidden, kind, centred, residual))
    assert_good(norm_backward(hidden, kind, centred, residual))


def test_a_size_that_is_no_multiple_of_16_bytes_spills_nothing_either() -> None:
    for binary in (norm_forward(8191, "bf16"), norm_backward(8191, "bf16")):
        assert (binary.stack, binary.local) == (0, 0)


@pytest.mark.parametrize("kind", POINTERS)
@pytest.mark.parametrize("form", ["tanh", "none", "silu"])
def test_activations_spill_nothing_and_load_16_bytes_at_a_time(form: str, kind: str) -> None:
    assert_good(activation("activation_forward_kernel", kind, form))
    assert_good(activation("activation_backward_kernel", kind, form))
    if form != "silu":
        assert_good(activation("bias_activation_backward_kernel", kind, form))


@pytest.mark.parametrize("kind", POINTERS)
def test_cross_entropy_spills_nothing_and_loads_16_bytes_at_a_time(kind: str) -> None:
    binary = cross_entropy("cross_entropy_forward_kernel", kind)
    assert (binary.stack, binary.local) == (0, 0)
    assert re.search(r"ld\.global\S*\.v4", binary.ptx)
    assert not re.search(r"\.f64\b", binary.ptx)
    assert_good(cross_entropy("cross_entropy_backward_kernel", kind))


def test_the_sums_over_programs_spill_nothing() -> None:
    from tpplan.kernels.column_sum_kernel import column_sum_kernel

    types: dict[str, str | None] = {"partial_ptr": FLOAT, "first_ptr": "*bf16", "second_ptr": "*bf16"}
    types |= {"programs": "i32", "HIDDEN": "i32"}
    binary = compile_for_hopper(column_sum_kernel, types, {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 32}, 4)
    assert (binary.stack, binary.local) == (0, 0)
    assert not re.search(r"\b(atom|red)\.", binary.ptx)


def test_a_new_number_of_rows_compiles_nothing_new() -> None:
    """Triton compiles anew for each value of a constant, and by itself for numbers that are 1 or divide by 16."""
    from tpplan.kernels import activation_kernel, column_sum_kernel, norm_backward_kernel, norm_forward_kernel

    checked: list[str] = []
    for module in (activation_kernel, column_sum_kernel, norm_backward_kernel, norm_forward_kernel):
        for name, kernel in vars(module).items():
            for parameter in getattr(kernel, "params", ()) if name.endswith("_kernel") else ():
                if parameter.name in ("rows", "programs"):
                    checked.append(name)
                    assert parameter.do_not_specialize and not parameter.is_constexpr, name
    assert len(checked) == 8

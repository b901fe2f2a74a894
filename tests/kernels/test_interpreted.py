"""The kernels against float64, in Triton's interpreter: the tests of numerics/, in a session of their own.

Triton reads TRITON_INTERPRET when it is imported, and every kernel in the process is then interpreted. To run a file by
itself: `TRITON_INTERPRET=1 pytest tests/kernels/numerics/test_norms.py`.

Mutations that were planted in a copy of the sources, each with the tests that then failed:

| in | planted | fails |
| --- | --- | --- |
| norms | x - mean not masked beyond the row | test_the_variance_of_a_constant_row_is_zero |
| norms | E[x²] - E[x]² for the variance | test_statistics_survive_a_mean_far_from_zero |
| norms | tiles merged without the distance of their means | test_statistics_of_a_wide_row_take_in_how_… |
| norms | statistics in the input's dtype | test_statistics_are_kept_in_float32 |
| norms | statistics of the unrounded sum | test_with_a_residual_the_norm_is_that_of_the_rounded_sum |
| norms | no rounding before the weight; no offset | test_rms_norm_has_the_variants_of_transformers |
| norms | weight gradient of unrounded values | test_the_weight_gradient_of_a_rounded_norm_… |
| norms | the input's row stride for the gradient's; the last dim taken as dense | test_any_strides_are_taken |
| norms | every other tile of rows, or a program's share, left out | test_any_number_of_rows_is_dealt_out |
| norms | what arrives for the residual forgotten | test_a_residual_and_its_norm_are_exact |
| all | row offsets in 32 bits, forward or backward | test_far_apart.py: the process dies |
| activations | erf for tanh; a slope without its second term | test_gelu_is_exact_in_both_forms |
| activations | gradients of gate and up mixed up | test_gated_activations_are_exact |
| activations | bias gradient of rounded values | test_the_bias_gradient_is_summed_in_float32 |
| cross entropy | the running sum not rescaled | test_loss_and_gradient_are_exact |
| cross entropy | log-sum-exp whole before the logit is taken off | test_a_small_loss_keeps_its_digits |
| cross entropy | ignored rows read | test_reductions_smoothing_and_ignored_rows |
| cross entropy | exp(-inf + inf) on a rank without a possible class | test_a_rank_without_a_single_possible_class_… |
| sharding | sums over sharded rows not partial | test_a_norm_keeps_what_is_sharded_beside_its_dims |
| sharding | normalized dims sharded | test_a_norm_over_two_dims_keeps_only_what_is_before_them |
| sharding | answers remembered without the settings | test_a_rule_remembers_how_many_dims_are_normalized |
| cross entropy | the summed gradient summed again | test_a_split_vocabulary_has_the_loss_of_… |
| Hopper | eps in float64; wide rows held in registers | test_norms_spill_nothing_and_load_16_bytes_at_a_time |
| Hopper | atomics for the bias | test_activations_spill_nothing_and_load_16_bytes_at_a_time |
| Hopper | the number of rows specialized | test_a_new_number_of_rows_compiles_nothing_new |
| operators | a fake kernel's dtype | test_opcheck_passes |
| operators | statistics that want gradients | test_a_statistic_has_no_gradient |
| operators | LayerNorm's gradient without its mean | test_the_formulas_agree_with_torch_and_its_autograd |
| backend | autocast ignored; the threshold ignored | test_under_cudas_autocast_…; test_on_a_gpu_the_size_… |
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUMERICS = Path(__file__).parent / "numerics"
ROOT = Path(__file__).parents[2]


def interpreter_is_broken() -> str:
    """Why Triton's interpreter can't run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton isn't installed"
    from importlib.metadata import version

    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return "the interpreter of triton before 3.7 needs numpy before 2.4" if triton < (3, 7) and numpy >= (2, 4) else ""


def run_interpreted(*arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments, str(NUMERICS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout, done.stdout


needs_interpreter = pytest.mark.skipif(bool(interpreter_is_broken()), reason=interpreter_is_broken())


@pytest.mark.slow
@needs_interpreter
def test_kernels_are_right_when_interpreted() -> None:
    run_interpreted()


@pytest.mark.sweep
@needs_interpreter
def test_kernels_are_right_when_interpreted_for_more_sizes() -> None:
    run_interpreted("-m", "slow")

"""What a program is said to cost is what the theory and the program itself say."""

from dataclasses import replace

import pytest

from tests.report.toy_program import one_module, parameter, reshard, toy_program
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL, sharded
from tpplan.compiler.ir.program import ModuleProgram
from tpplan.cost.traffic import (
    gradient_sum_traffic,
    memory,
    module_traffic,
    reshard_traffic,
)


def test_an_all_reduce_of_2048_tokens_of_width_4096_sends_28_mib_from_each_of_8_ranks() -> None:
    whole = reshard(PARTIAL, REPLICATED, shape=(1, 2048, 4096), itemsize=2)
    assert whole.bytes == 16 * 2**20
    traffic = reshard_traffic(whole, 8)
    assert (traffic.forward.total, traffic.backward.total) == (28 * 2**20, 0)


def test_sequence_parallelism_sends_as_much_as_an_all_reduce() -> None:
    gather, scatter = reshard(sharded(1), REPLICATED_PARTIAL), reshard(PARTIAL, sharded(1))
    reduce = reshard(PARTIAL, REPLICATED)
    both = reshard_traffic(gather, 4) + reshard_traffic(scatter, 4)
    assert both.forward.total == reshard_traffic(reduce, 4).forward.total == both.backward.total


def test_a_step_runs_the_collectives_that_the_program_counts() -> None:
    program = toy_program()
    step = module_traffic(program.modules, program.size)
    assert step.forward.counts == program.count_collectives(backward=False)
    together = step.forward + step.backward + gradient_sum_traffic(program)
    assert together.counts == program.count_collectives()


def test_a_module_that_is_called_twice_sends_twice() -> None:
    module = ModuleProgram("shared", "Linear", "rowwise", "", 1, exits=(reshard(PARTIAL, REPLICATED),))
    once, twice = module_traffic([module], 4), module_traffic([replace(module, calls=2)], 4)
    assert twice.forward.total == 2 * once.forward.total and twice.forward.counts == {"all-reduce": 2}


def test_a_value_without_gradient_sends_nothing_backward() -> None:
    table = reshard(REPLICATED, REPLICATED_PARTIAL, differentiable=False)
    assert reshard_traffic(table, 4).backward.number == 0


def test_slices_and_pads_send_nothing() -> None:
    assert reshard_traffic(reshard(REPLICATED_PARTIAL, sharded(1)), 4).forward.number == 0


@pytest.mark.parametrize(("dtypes", "number"), [(["float32"] * 3, 1), (["float32", "bfloat16"], 2)])
def test_gradient_sums_are_one_all_reduce_a_dtype(dtypes: list[str], number: int) -> None:
    held = [parameter(f"n{i}", shape=(64,), summed=True, dtype=dtype) for i, dtype in enumerate(dtypes)]
    module = ModuleProgram("", "Model", None, "inferred", 1)
    sums = gradient_sum_traffic(one_module(module, *held))
    assert sums.counts == {"all-reduce": number}
    assert sums.total == sum(p.bytes for p in held) * 2 * 3 // 4


def test_a_frozen_parameter_is_not_summed() -> None:
    frozen = replace(parameter("n", shape=(64,), summed=True), trainable=False)
    assert gradient_sum_traffic(one_module(ModuleProgram("", "Model", None, "", 1), frozen)).number == 0


def test_memory_counts_a_tied_parameter_once_and_a_replicated_one_whole() -> None:
    held = memory([parameter("a", "b", shape=(128, 64), dim=0), parameter("n", shape=(64,))])
    assert (held.whole, held.local, held.replicated) == (33024, 8448, 256)
    assert held.share == pytest.approx(8448 / 33024)


def test_a_model_without_parameters_is_held_whole() -> None:
    assert memory([]).share == 1.0

"""The sharded run on simulated ranks: a thread each, in this process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from tpplan.compiler.ir.program import Program
from tpplan.parity.call import Call
from tpplan.parity.rank import RankResult, run_rank
from tpplan.parity.threads import TIMEOUT, ThreadCommunicator, run_ranks


def run_simulated(
    model: nn.Module, program: Program, call: Call, cotangents: Mapping[str, Tensor], timeout: float = TIMEOUT
) -> list[RankResult]:
    """Run `program` on all ranks at once and return what each shows, in rank order.

    Raises:
        VerifyError: see `run_ranks`.
    """

    def work(axis: ThreadCommunicator) -> RankResult:
        return run_rank(model, program, call, cotangents, axis)

    return run_ranks(program.size, work, timeout)

"""The sharded run on simulated ranks: a thread each, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import Tensor, nn

from tpplan.compiler.ir.program import Program
from tpplan.parity.call import Call
from tpplan.parity.drawn import Draws, DrawsOfRank
from tpplan.parity.rank import RankResult, run_rank
from tpplan.parity.threads import TIMEOUT, ThreadCommunicator, run_ranks


def run_simulated(
    model: nn.Module,
    program: Program,
    call: Call,
    cotangents: Mapping[str, Tensor],
    timeout: float = TIMEOUT,
    draws: Draws | None = None,
) -> list[RankResult]:
    """Run `program` on all ranks at once and return what each shows, in rank order.

    With `draws`, each rank draws random numbers as the unsharded model did.

    Raises:
        VerifyError: see `run_ranks`.
    """

    def work(axis: ThreadCommunicator) -> RankResult:
        with contextlib.nullcontext() if draws is None else DrawsOfRank(draws, program, axis.rank):
            return run_rank(model, program, call, cotangents, axis)

    return run_ranks(program.size, work, timeout)

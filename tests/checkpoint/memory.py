"""The private memory of a process, as the benchmark of checkpoints counts it."""

from tpplan.bench.checkpoint_ranks import peak_memory as peak

MIB = 1024**2

__all__ = ["MIB", "peak"]

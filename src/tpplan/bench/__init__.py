"""Benchmarks: what a sharded model costs to run and to compile, and which collectives it issues.

None needs a GPU, nor more than one process: the process group is torch's fake one, whose collectives return at once.
"""

BENCHMARKS = (
    "collectives", "overhead", "loop", "compile", "checkpoint", "loss", "overlap", "alternatives", "serving",
    "requests",
)  # fmt: skip
__all__ = ["BENCHMARKS"]

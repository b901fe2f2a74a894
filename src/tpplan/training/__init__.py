"""Training loops of others: what accelerate's `Accelerator` and transformers' `Trainer` must know of sharded models.

Importing this loads neither of them, and changes nothing; see `follow`.
"""

from __future__ import annotations

from tpplan.training.follow import follow

__all__ = ["follow"]

"""The stock model's initialisation, recorded on `meta` and replayed tensor by tensor into a sharded model."""

from tpplan.initialize.findings import InitializationError
from tpplan.initialize.init import init_weights

__all__ = ["InitializationError", "init_weights"]

"""The stock model's initialisation, recorded on `meta` and replayed tensor by tensor into a sharded model.

`torch.nn.init` and `reset_parameters` on DTensors draw other numbers than on whole tensors: on the CPU those of each
rank's part begin anew, so that equal seeds give equal parts. Nothing in torch replays a constructor.
"""

from tpplan.initialize.findings import InitializationError
from tpplan.initialize.init import init_weights

__all__ = ["InitializationError", "init_weights"]

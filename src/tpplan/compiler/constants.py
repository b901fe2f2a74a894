"""Constants: the numbers of small tensors that a model makes out of Python numbers on its own device.

On the meta device such a tensor has no entries, and torch issues no operation for it, so that a division by
`torch.tensor(x.shape[1])` would look the same on whole and on local shapes. Their numbers are kept aside, for the check
to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpplan.compiler.recorder import Recorder

_POSITION_OF_DATA = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, Tensor.new_tensor: 1}


class ConstantWatcher(TorchFunctionMode):
    """Notes the numbers that meta tensors are made of."""

    def __init__(self, recorder: Recorder) -> None:
        """Tell `recorder`."""
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and keep its numbers if it makes a tensor of Python's."""
        keywords: dict[str, Any] = kwargs or {}
        result = func(*args, **keywords)
        position = _POSITION_OF_DATA.get(func)
        if position is not None and isinstance(result, Tensor) and result.is_meta:
            data = args[position] if position < len(args) else keywords.get("data", keywords.get("obj"))
            if not isinstance(data, Tensor):
                numbers = torch.tensor(data, dtype=result.dtype, device="cpu")
                self._recorder.new_value(result, result.requires_grad, numbers=numbers)
        return result

"""Checkpoints: safetensors in, shards out, and back."""

from tpplan.checkpoint.loading import load_weights
from tpplan.checkpoint.save import save_weights

__all__ = ["load_weights", "save_weights"]

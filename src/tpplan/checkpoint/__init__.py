"""Checkpoints: safetensors in, shards out, and back."""

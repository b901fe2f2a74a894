"""Sharded models under data parallelism, and optimizers."""

"""Sharded models under torch.compile."""

"""The run on local shapes: whether every body does on a shard what the trace did on whole tensors."""

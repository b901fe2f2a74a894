"""What communication, kernels and memory cost on given GPUs, and what of it overlap hides."""

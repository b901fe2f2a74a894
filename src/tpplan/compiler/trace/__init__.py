"""One run of the stock model on meta tensors, recorded."""

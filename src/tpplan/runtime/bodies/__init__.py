"""Bodies that take the place of stock forwards."""

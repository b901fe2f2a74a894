"""Bugs that are planted on purpose, to see which tests notice; run by `make mutations`."""

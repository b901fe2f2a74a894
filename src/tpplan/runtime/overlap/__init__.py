"""Collectives beside the matrix products that they serve."""

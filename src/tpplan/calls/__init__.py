"""Calls of a sharded model: which are proved, and by which program each runs."""

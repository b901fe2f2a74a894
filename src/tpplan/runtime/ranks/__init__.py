"""Ranks: what they exchange, and what they do when one of them fails."""

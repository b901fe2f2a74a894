"""Bodies that take the place of stock ones: what is recognised, and what runs from its record."""

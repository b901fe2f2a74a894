"""State: what Python can see of an object, whether it is the same later, and where it isn't."""

"""The program: kernels where they fit, and everything that was decided, as plain data."""

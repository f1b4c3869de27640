"""The few whole-array operations that a step is made of, compiled where numba is installed: start at ``choice``."""

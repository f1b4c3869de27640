"""Casts, sizes, and other small tools that know nothing of training."""

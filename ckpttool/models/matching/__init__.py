"""Finds which tensors of two models are the same, by names, shapes and values."""

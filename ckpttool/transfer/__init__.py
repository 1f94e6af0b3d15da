"""Moves bytes from a source to a destination: plan, execute, check, and commit."""

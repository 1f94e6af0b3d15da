"""Optimizer state dicts: parse them, name their parameters, and write them keyed by FQN, by id or flattened."""

"""Describes a catalogue: its header, parts, modules, tensors, sharding and optimizers."""

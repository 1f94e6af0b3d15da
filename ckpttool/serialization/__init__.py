"""Reads and writes pickles, torch.save archives and streams, safetensors headers and JSON.

Nothing here knows of checkpoints; `formats` are built from these.
"""

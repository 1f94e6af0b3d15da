"""What checkpoint files are made of: pickles, torch.save archives and streams, safetensors headers, typed JSON.

A container knows its bytes and nothing of checkpoints; formats put containers together.
"""

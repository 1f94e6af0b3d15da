"""ckpttool: inspect and convert PyTorch training checkpoints."""

"""Reshards through torch: a model on the meta device is loaded and saved by torch.distributed.checkpoint."""

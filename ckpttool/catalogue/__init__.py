"""The data structure: named tensors and objects, the boxes of each tensor, and where their bytes are. Pure."""

"""What differs between two checkpoints: tensors, their elements, objects."""

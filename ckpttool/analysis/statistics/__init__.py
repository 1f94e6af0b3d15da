"""Statistics of tensors, collected in one pass and in constant memory."""

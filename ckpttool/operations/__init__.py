"""What ckpttool does: one module or package for each command."""

"""Whether a checkpoint fits a released model: names, shapes, dtypes and values."""

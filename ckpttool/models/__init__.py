"""What a released model is: its names, its configuration, its files, and how others become it."""

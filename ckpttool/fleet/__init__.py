"""Whole runs: commands that call others for every checkpoint, or decide which of them stay."""

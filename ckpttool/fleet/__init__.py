"""Whole runs: commands that call others for every checkpoint, or decide which of them stay. And the processes of a
command of somebody else, which are started, and ended with all that they have started."""

"""The index of a DCP directory, `.metadata`, as data."""

"""The version, alone in its file so that the build can read it without importing anything."""

__version__ = "0.1.0"
_SCHEMAS = 2


def schema(command: str) -> str:
    """Return the name of the schema of what a command prints with `--json`: `ckpttool/convert/2`."""
    return f"ckpttool/{command}/{_SCHEMAS}"

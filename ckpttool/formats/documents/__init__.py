"""Documents beside a checkpoint that hold values of its state: JSON, YAML, and a text that is one number.

    JSON    an object, an array or a number, with NaN and Infinity as Python writes them
    YAML    a mapping or a sequence of mappings, its keys names; no tags, at most `MAX_SIZE` bytes

What describes a model or an index of other files (`config.json`) is none: its checkpoint lies beside it.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format, deferred

JSON = Format(
    name="json",
    title="JSON document of values beside a checkpoint",
    recognise=deferred(f"{__name__}.reader", "is_json"),
    open=deferred(f"{__name__}.reader", "open_json"),
    create=deferred(f"{__name__}.writer", "create_json"),
    losses=deferred(f"{__name__}.writer", "json_losses"),
    is_file=lambda path: True,
    component_only=True,
)
"""A JSON document, or a text that is one number, as a catalogue."""
YAML = Format(
    name="yaml",
    title="YAML document of values beside a checkpoint",
    recognise=deferred(f"{__name__}.reader", "is_yaml"),
    open=deferred(f"{__name__}.reader", "open_yaml"),
    create=deferred(f"{__name__}.writer", "create_yaml"),
    losses=deferred(f"{__name__}.writer", "yaml_losses"),
    is_file=lambda path: True,
    component_only=True,
)
"""A YAML document as a catalogue."""

"""Documents beside a checkpoint that hold values of its state: JSON, YAML, and a text that is one number.

    JSON    an object, an array or a number, with NaN and Infinity as Python writes them
    YAML    a mapping or a sequence of mappings, its keys names; no tags, at most `MAX_SIZE` bytes

What describes a model or an index of other files (`config.json`) is none: its checkpoint lies beside it.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import beside

JSON = beside(__name__, "json", "json", "JSON document of values")
"""A JSON document, or a text that is one number, as a catalogue."""
YAML = beside(__name__, "yaml", "yaml", "YAML document of values")
"""A YAML document as a catalogue."""

"""NumPy's own files: .npz, a zip archive of arrays, and .npy, one array.

    .npz    NAME.npy for each array, stored (`numpy.savez`) or deflated (`numpy.savez_compressed`)
    .npy    a header, which `serialization/numpy_arrays` reads, and the elements

Stored arrays lie in the file; deflated ones are decompressed into a temporary file.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format, deferred

NPZ = Format(
    name="npz",
    title="NumPy's archive of arrays beside a checkpoint",
    recognise=deferred(f"{__name__}.reader", "is_archive"),
    open=deferred(f"{__name__}.reader", "open_archive"),
    create=deferred(f"{__name__}.writer", "create_archive"),
    losses=deferred(f"{__name__}.writer", "archive_losses"),
    is_file=lambda path: True,
    component_only=True,
)
"""A file of `numpy.savez`, as a catalogue."""
NPY = Format(
    name="npy",
    title="array of NumPy beside a checkpoint",
    recognise=deferred(f"{__name__}.reader", "is_array"),
    open=deferred(f"{__name__}.reader", "open_array"),
    create=deferred(f"{__name__}.writer", "create_array"),
    losses=deferred(f"{__name__}.writer", "array_losses"),
    is_file=lambda path: True,
    component_only=True,
)
"""A file of `numpy.save`, as a catalogue."""

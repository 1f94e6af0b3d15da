"""NumPy's own files: .npz, a zip archive of arrays, and .npy, one array.

    .npz    NAME.npy for each array, stored (`numpy.savez`) or deflated (`numpy.savez_compressed`)
    .npy    a header, which `serialization/numpy_arrays` reads, and the elements

Stored arrays lie in the file; deflated ones are decompressed into a temporary file.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import beside

NPZ = beside(__name__, "archive", "npz", "NumPy's archive of arrays")
"""A file of `numpy.savez`, as a catalogue."""
NPY = beside(__name__, "array", "npy", "array of NumPy")
"""A file of `numpy.save`, as a catalogue."""

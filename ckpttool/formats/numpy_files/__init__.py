"""NumPy's own files: .npz, a zip archive of arrays, and .npy, one array; and .memmap of tensordict, its elements alone.

    .npz    NAME.npy for each array, stored (`numpy.savez`) or deflated (`numpy.savez_compressed`)
    .npy    a header, which `serialization/numpy_arrays` reads, and the elements
    .memmap the elements; `meta.json` beside it has {"obs": {"dtype": "torch.float32", "shape": [10, 3], ...}, ...}

Stored arrays lie in the file; deflated ones are decompressed into a temporary file.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import beside

NPZ = beside(__name__, "archive", "npz", "NumPy's archive of arrays")
"""A file of `numpy.savez`, as a catalogue."""
NPY = beside(__name__, "array", "npy", "array of NumPy")
"""A file of `numpy.save`, as a catalogue."""
MEMMAP = beside(__name__, "map", "memmap", "memory map of tensordict")
"""A file of `TensorDict.memmap`, as a catalogue."""

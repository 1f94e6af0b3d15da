"""Bare pickles: what `pickle.dump` writes beside a checkpoint, .pkl .pickle .p or any other name.

    protocol 0 to 5    one pickle from the first byte to the last; arrays of NumPy and tensors of torch in it as bytes

Arrays become tensors that lie in the file (`serialization/pickle_payloads`, `serialization/numpy_arrays`), those of
torch too: each is a legacy file of torch inside the pickle. Everything else is as in a file of torch.save.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import beside

FORMAT = beside(__name__, "pickle", "pickle", "bare pickle")
"""A file of `pickle.dump`, as a catalogue."""

"""Functions from catalogue to catalogue: select, rename, cast, and assign boxes to ranks. Pure."""

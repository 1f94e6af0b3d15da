"""`ckpttool verify`: is this checkpoint whole?"""

from __future__ import annotations

from functools import partial

from ckpttool.cli import options
from ckpttool.cli.answer import respond
from ckpttool.cli.parsing import library_arguments


def verify(
    path: options.Checkpoint, *,
    shapes: options.Shapes = None,
    against: options.Against = None, manifest: options.AgainstManifest = None,
    write_manifest: options.WriteManifest = None, check_values: options.CheckValues = False,
    threads: options.Threads = None,
    html: options.VerifyHtml = None, as_json: options.AsJson = False, quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:  # fmt: skip
    """Read a whole checkpoint and report all damage.

    Compares every stored checksum, and the index with the files. The exit code is 4 for damage, 1 for NaN or a
    difference, 3 if something could not be read, else 0.

    Examples:
        ckpttool verify step-1000
        ckpttool verify step-1000 --values
        ckpttool verify copy --against step-1000
    """
    arguments = library_arguments(locals())
    import ckpttool
    from ckpttool.operations.verify.report import blocks

    call = partial(ckpttool.verify, **arguments)
    respond(call, blocks, as_json=as_json, quiet=quiet, verbose=verbose, html=arguments["html"])

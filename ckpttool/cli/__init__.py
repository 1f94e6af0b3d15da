"""The command line: parse, one call of the library, print. The only importer of typer, rich and tabulate."""

"""Pages about checkpoints, as HTML files that open offline: of `report`, and of other commands with `--html`."""

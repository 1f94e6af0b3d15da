"""What `browse` shows, without a screen: `session` opens checkpoints, `survey` reads statistics in the background,
`folding` makes a tree of names, `search` selects tensors, `pixels` reads what a picture needs."""

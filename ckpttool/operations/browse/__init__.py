"""What `browse` shows, without a screen: `session` opens checkpoints, `survey` reads statistics in the background,
`folding` makes a tree of names, `search` selects tensors, `pixels` and `pairs` read what a picture and a diff need."""

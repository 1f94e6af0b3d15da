"""What `from_pretrained` and every tool of the Hub expects, made of any checkpoint: weights, index, config, tokenizer.

The weights of each file are laid out and transferred alone, so that a file can be made, sent and removed before the
next one is begun.
"""

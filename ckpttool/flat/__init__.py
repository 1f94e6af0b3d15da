"""Flattened parameters of FSDP1 and of ZeRO: which elements of which rank's file are which box of a tensor."""

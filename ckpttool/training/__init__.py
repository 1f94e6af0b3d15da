"""The part of the library that lives inside a process group. It imports torch, and is imported when it is asked for."""

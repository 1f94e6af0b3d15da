"""What is in a catalogue and in its values, for people."""

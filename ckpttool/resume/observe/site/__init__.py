"""What runs in the processes of a command, where nothing of ckpttool can be imported."""

"""What a process owns of its machine, and where arrays live."""

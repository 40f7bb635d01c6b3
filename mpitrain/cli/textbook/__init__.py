"""The commands of the textbook: explain, claims, exercise, check."""

"""The commands of the textbook: claims, exercise, check."""

"""Textbook sentences as rows of a table, with the experiments that measure them."""

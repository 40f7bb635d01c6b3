"""Decoding of text: readers of token windows, and sampling of the next token."""

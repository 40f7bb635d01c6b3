"""Folders of other projects: their tensors, and what is refused."""

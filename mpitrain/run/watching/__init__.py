"""Observers of a run: the base class of watchers, and TensorBoard event files."""

"""One training run: configuration, trainer, training loop, run directory and checkpoints."""

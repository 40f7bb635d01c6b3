"""`mpitrain bench train`: training steps, in turns with other settings or with PyTorch."""

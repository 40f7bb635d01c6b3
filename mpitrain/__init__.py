"""mpitrain: distributed training with nothing but message passing."""

__version__ = "0.1.0"

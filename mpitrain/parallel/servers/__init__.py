"""Parameter servers: synchronous, asynchronous and bounded, and a master that owns the model."""

"""The Replication protocol, the state that checkpoints save, and loss scaling."""

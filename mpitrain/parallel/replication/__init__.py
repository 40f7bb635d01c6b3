"""The Replication protocol, the state a checkpoint saves, and loss scaling."""

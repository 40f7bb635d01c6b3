"""Stand-ins for hardware that the machine running the tests does not have."""

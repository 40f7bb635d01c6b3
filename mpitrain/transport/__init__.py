"""Point-to-point messages between ranks: one protocol, several transports."""

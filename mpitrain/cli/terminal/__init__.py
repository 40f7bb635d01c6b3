"""The terminal: bars, rows, and output that never runs into them."""

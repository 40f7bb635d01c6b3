"""The terminal: progress bars, table rows, and other output that never overwrites them."""

"""Networks as flat lists of units."""

"""The sentences that tests expect of `mpitrain/ops`."""

MISSING_JSON_CANNOT_READ = "missing\\.json cannot be read: No such file"
NO_TABLE_TILES = "is no table of tiles"

"""The Korean of the exercises."""

EXERCISES: dict[str, str] = {}

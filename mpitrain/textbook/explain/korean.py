"""The Korean of the explanations: English text, and the same in Korean."""

EXPLAIN: dict[str, str] = {}

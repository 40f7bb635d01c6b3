"""Message plans as data: the sends, receives and reductions of each rank in each step."""

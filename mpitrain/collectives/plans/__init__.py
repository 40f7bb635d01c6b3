"""Message plans: what each rank sends, receives and combines in each step, as data."""

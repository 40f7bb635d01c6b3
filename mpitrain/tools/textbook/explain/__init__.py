"""`mpitrain learn explain`: topics, recorded as frames from runs of real plans, layers and schedules."""

"""`mpitrain doctor`: facts about the machine and its ranks, and probes that find problems before training does."""

"""The facts about a machine and its ranks, and probes that find problems before training does."""

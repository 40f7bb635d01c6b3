"""The sentences that tests expect of `mpitrain/textbook`."""

RANK_RETURNED_OTHER_WAITS = "rank 0 has returned; rank 1 waits"
RANK_WAITS_STEP = "rank 0 waits in step 1"
RANKS_SHARE_NO_MEMORY = "ranks share no memory"

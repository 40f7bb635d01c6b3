"""The sentences that tests expect of `mpitrain/parallel`."""

ALGORITHM_SHARED_NEEDS_ALL = "algorithm shared needs all ranks on one host, but they are on 2"
ALL_RANKS_NEED_ONE = "All ranks need one configuration, but model\\.context is 16 on rank 0"
GATHERED_REDUCED_ONCE_COMES = "gathered and reduced once, but {} comes back to chunks."
LAST_STEPS_UP_STEP = "The last 20 steps up to step 20 .* a loss scale of 1\\."
MODE_SERVER_NEEDS = "Mode server needs {} .*, but it is {}"
RANKS_SHARE_VOCABULARY_ENTRIES = (
    "4 ranks share a vocabulary, but it has 3 entries\\.\\n +Set layout.tp to at most 3\\."
)
SET_PIPELINE_SCHEDULE_REPLICATION = "Set pipeline.schedule to {}, or replication.zero to 0 or 1."
SHARD_HOST_THERE_START = "shard host .* but there are 2 on a, 1 on b\\.\\n +Start as many"

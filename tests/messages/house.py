"""The sentences that tests expect of `mpitrain/house`."""

DIRECTORY_NAMED_WAY = "a directory named {} is in the way"
ENDED_BEFORE_FIRST_CHECKPOINT = "ended before its first checkpoint"
NAME_ONE_FILE = "not the name of one file"
NO_ATTRIBUTE_OPTIMIZER_OFFERS = (
    "no attribute 'Optimizer'; it offers ColumnParallelLinear, Config, Group"
)
RUN_GOING_PROCESS_SOMEWHERE = "A run is going on in .* \\(process 1 on somewhere\\)"

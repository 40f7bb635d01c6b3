"""The sentences that tests expect of `mpitrain/plan`."""

CHUNKS_ONE_MESSAGE = "2-3       chunks 2 to 3 in one message"
COUNTS_MEASURED_WHILE_OTHER = "~ 3 of 6 counts: measured while other work ran"
MPITRAIN_PLAN_SCHEDULE_JSON = "`mpitrain plan schedule --json FILE` writes one that can."
NOTHING_BESIDES_ROWS = "nothing besides its rows"
NO_COUNT_CAN = "No count can be named"
NO_COUNT_CAN_NAMED = "No count can be named: measure again while nothing else runs."
PLOT_DRAWS_FILES_END = "--plot draws files that end in"
SCHEDULE_CANNOT_RUN = "The schedule {} cannot be run:"
SENT_BUSIEST_ONE_IF = "sent by the busiest one      2.5 S    2 (n' - 1)/n' S, + S if r > 0 "
STAGES_MICRO_BATCHES_OWN = (
    "is for 2 stages and 3 micro-batches, and has its own chunks; asked for were"
)
STAGES_ZERO_BUBBLE_ROWS = "2 stages by zero-bubble, 4 rows in each of 2 replica(s), "
STREAM_LEAST_MANY_MICRO = (
    "A stream has at least as many micro-batches in a step as stages, but these are 3 and 4."
)
SAME_RESULTS_KEYS = "same results:   --set batch.size=8 --set batch.micro_batches="

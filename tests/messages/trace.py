"""The sentences that tests expect of `mpitrain/trace`."""

BEFORE_STEP_WAITING_SUMS = (
    "0.000 s before: in step 7, waiting for the sums of gradients; under way: receive from rank 0"
)
CANNOT_SAID_WITHOUT_TRACES = "cannot be said without the traces of all ranks"
FIRST_FALL_SILENT_RANK = "First to fall silent was rank 0."
LONGEST_RANK_HOST_ALL = "longest for rank 2 on host2: 9.4% of all time, of 9.4%"
RANK_COMPUTES_LONGEST = "Rank 2 computes longest: 5000.0 ms a step."
RANK_COMPUTES_LONGEST_MS = (
    "Rank 2 computes longest: 5200.0 ms a step, 1.30 times the median of the others."
)
RANK_COMPUTES_LONGEST_MS_STEP = (
    "Rank 1 computes longest: 5200.0 ms a step, 1.30 times the median of the other workers."
)
RANK_HOST_BEFORE_STEP = (
    "  rank 0 on host0, 2.000 s before: in step 7, backward of blocks.1.mlp, micro-batch "
    "3; under way: receive from rank 1: all-reduce of bucket 2, 65,536 bytes"
)
THERE_NO_TRACE_RUN = "There is no trace of a run in"
TRACE_ANOTHER_VERSION = "is a trace of another version"
WHAT_EACH_RANK_DID = "What each rank did last"
WHERE_TIME_WENT_PRE = "<p>Where the time went in .*</p>\\n<pre> +all +rank 0"
WORKERS_WAITED_LONGEST_RANK = "The workers waited longest for rank 1 on host1: "
WORKERS_WAITED_LONGEST_RANK_SERVER = "The workers waited longest for rank 2, a server, on host2: "

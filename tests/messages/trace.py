"""The sentences that tests expect of `mpitrain/trace`."""

BEFORE_STEP_WAITING_SUMS = (
    "0.000 s before: in step 7, waiting for the sums of gradients; under way: receive from rank 0"
)
CANNOT_SAID_WITHOUT_TRACES = "cannot be said without the traces of all ranks"
FIRST_DIVERGENCE = (
    "First divergence: rank 0 on host0 has not moved for 2 s: step 7, backward of blocks.1.mlp, "
    "micro-batch 3; rank 2 on host2 has waited for the sums of gradients for 0 s."
)
FIRST_FALL_SILENT_RANK = "First to fall silent was rank 0."
LONGEST_RANK_HOST_ALL = "longest for rank 2 on host2: 9.4% of all time. In total, ranks waited 9.4%"
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
CIRCLE = (
    "Ranks wait for each other in a circle: rank 1 on node1 has waited for gradient of micro-batch 2 "
    "of rank 2 for 56 s; rank 2 on node2 has waited for activation of micro-batch 2 of rank 1 for 57 s."
)
CALL_NOT_ENTERED = (
    "Ranks are in different calls: rank 1 in a barrier, which rank 0 has not entered (rank 1 on node1: "
    "step 14, waiting for a barrier; rank 0 on node0: step 14, waiting for gradient)."
)
DIFFERENT_CALLS = (
    "Ranks are in different calls: rank 1 in a barrier; ranks 0, 2, 3 in the sums of "
    "gradients (rank 1 on node1: step 14, waiting for a barrier; rank 0 on node0: step 14, waiting "
    "for the sums of gradients)."
)
MESSAGE_MISSING = (
    "A message is missing: rank 0 on node0 has waited for chunk of micro-batch 2 of rank 1 for 58 s "
    "(tag 7; step 14, waiting for the sums of gradients). Rank 1 on node1 has {}: step 14, "
    "waiting for the control message."
)
NO_RANK_TO_BLAME = "No rank is to blame"
PROCESS = {"gone": "is gone", "left": "has left", "stopped": "kill -CONT 4711"}
RANK_NOT_MOVED = (
    "rank 2 on node2 has not moved for 59 s: step 14, backward of blocks.3.mlp, micro-batch 1; "
    "rank 1 on node1 has waited for activation of micro-batch 2 of rank 2 for 58 s."
)
SENT = ("not sent it", "sent it")

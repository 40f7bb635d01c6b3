"""The sentences that tests expect of `mpitrain/bench`."""

ALGORITHM_BUFFERS_AVERAGE = "algorithm buffers average busbw"
ALGORITHM_BUFFERS_AVERAGE_BUSBW = (
    "algorithm buffers average busbw times native's speed: mean, least"
)
ALLREDUCE_ALGORITHM_SHARED_NEEDS = "allreduce algorithm shared needs all ranks on one host"
ALL_PAIRS_RANKS_HOST = "all pairs of 4 ranks on 4 host(s)"
BELOW_MEDIAN_MARKED_SO = "below 2; its median is marked ~, so measure again"
BOTH_WAYS_CARRY_TIMES = "both ways carry 1.50 times as much as one way at 64"
BOTH_WAYS_CARRY_TIMES_MUCH = "both ways carry 1.50 times as much as one way at 256 bytes:"
BYTES_ALL_GRADIENTS_PADDING = (
    "with S bytes of all gradients, padding included, n ranks; besides, control messages "
    "and headers"
)
COMPILES_KERNELS_LATER_THERE = (
    "compiles kernels with g++ 11 or later on x86-64, but there is no g++ here."
)
COUNT_DTYPE_MIN_ALGBW = "count, dtype, min, algbw, predicted"
DEVICE_PIPE = "it is a device or a pipe"
EVERY_LINK_RANK_SLOW = "every link of rank 2 on c is slow: look at that host"
MEASURES_MESSAGES_BETWEEN_TWO = "measures messages between two ranks, but there is one"
NAME_FILE_REPLICATION_TUNING = "{}, and name its file in replication.tuning"
NO_LINK_FAR = "no link is far"
NO_LINK_FAR_OTHERS = "no link is far from the others of its class"
NO_SIZE_ROW_ONE = "no size has a row of one way and a row of both ways that are free of ~"
ODD_LINK_RANK_RANK = (
    "odd link: rank 0 on a and rank 2 on c: bandwidth 0.0953 GB/s, where 0.672 GB/s is "
    "usual between hosts"
)
ONE_WAY_MOST_GB = "one way    at most 2.00 GB/s at 64 bytes, 2000000 messages/s"
ONE_WAY_MOST_GB_BYTES = "one way    at most 8.00 GB/s at 4096 bytes"
OTHER_WORK_RAN_MEANWHILE = "~: other work ran meanwhile"
RANKS_NO_ROOM_COLUMNS = (
    "8 ranks have no room in 60 columns: --json, --csv and --plot have every pair"
)
RANKS_SHARE_CORES_SO = "ranks share cores, so links within a host are not judged"
RED_FRAME_LINK_FAR = "Red frame: a link far from its class"
RING_WINDOW_GB_BYTES = "ring window 2.00 GB/s 1.00, 0.500 at 9000 bytes"
ROWS_ABOVE_TIMES_MEDIAN = "~ 1 of 2 rows: p99 above 2 times the median"
ROWS_JSON_CANNOT_WRITTEN = "rows.json cannot be written: No such file or directory."
ROWS_LEFT_OUT_THEIR = "~ {} of {} rows are left out: their median is above 2 times the fastest run"
ROWS_MEDIAN_ABOVE_TIMES = "~ 1 of 4 rows: median above 2 times the fastest window"
ROWS_MEDIAN_ABOVE_TIMES_FASTEST = "~ 2 of 7 rows: median above 2 times the fastest run"
SIZES_GROW_FACTOR_MORE = "Sizes grow by a factor of 1.01 or more, but this is .*\\n.*--factor"
STAR_SENDS_ROOT = "star               sends (n-1) S, the root"
TOO_SLOW_TREE_WINDOW = (
    "too slow: tree (window) has a bus bandwidth of 2.00 GB/s at 9000 bytes, below 2.5"
)
TREE_WINDOW_ALL_MARKED = "tree window all marked ~"

"""The sentences that tests expect of `mpitrain/collectives`."""

ALGORITHM_NATIVE_NEEDS_DTYPE = (
    "algorithm native needs a dtype that MPI reduces, which float16 is not."
)
ALGORITHM_SHARED_NEEDS_BYTES = "algorithm shared needs 2 x 4,000 bytes in /dev/shm"
ARRAY_GAPS = "an array with gaps"
CANNOT_HANDED_OTHER_PROCESSES = "cannot be handed to other processes: libcuda.so.1: cannot open"
EVERY_RANK_WAITS_NO = "every rank waits and no message can move"
EXCHANGE_NEEDS_ONE_SIZE = "exchange needs one size on every rank, but it is 5 on rank 0"
MUST_ONE_RING_AUTO = "must be one of ring, .*{}, auto, but"
NEEDS_ALL_RANKS_ONE = "needs all ranks on one host, but they are on 2."
NEEDS_CONTIGUOUS_ARRAYS_PLAIN = (
    "needs contiguous arrays of plain numbers on every rank, but rank 0 passed an array with gaps"
)
NEEDS_TWO_ARRAYS_ALIKE = "needs two arrays alike"
NEED_ONE_ANSWER_OWN = "need one answer of own"
OVERLAP_NO_RANK = "overlap on no rank"
OWN_JSON_NO_TUNING = "own\\.json is no tuning file: it has no 'machine'"
PAD_BOTH_ELEMENTS = "Pad both to {} elements"
RANK_ALL_REDUCE_NEEDS = "rank {}: all-reduce needs one count on every rank"
REPLICATION_ALGORITHM_MUST_RING = (
    "ConfigError: replication.algorithm must be 'ring', 'halving-doubling', "
    "'recursive-doubling', 'tree', 'star', 'hierarchical', 'shared', 'native' or 'auto', "
    "but is 'rign'; did you mean ring?"
)
ROOT_AMONG_RANKS = "root {} is not among ranks"
ROWS_DIVIDED_RANKS = "{} rows are to be divided by {} ranks"
TRANSPORT_HOST = "this transport is the host's"
WIRE_FORMAT_INT_TAKES = "wire format int8 takes float32, but the array is float64"
WIRE_ONE_NONE_FP = "wire is one of none, fp16, bf16, int8, topk, powersgd"

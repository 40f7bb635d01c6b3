"""The sentences that tests expect of `mpitrain/run`."""

ADD_OUT_DIR_NO = "Add --out DIR; no run under runs has a checkpoint."
ADD_RESUME_GO = "Add --resume to go on"
ALL_STEPS_DONE_BEFORE = "all 6 steps were done before; to train on, set run.steps to more"
BLOCKS_ATTENTION_SHAPE_CHECKPOINT = (
    "blocks.1.attention.\\S+ of shape .* but the checkpoint has none"
)
CANNOT_WRITTEN_NO_SPACE = "{} cannot be written: No space left on device."
CANNOT_WRITTEN_NO_SPACE_LEFT = "cannot be written.*No space left"
DAMAGED_BYTES_WHERE_MANIFEST = "{} is damaged: it has \\d+ bytes where manifest.json says"
DAMAGED_REGULAR_FILE = "{} is damaged: .*it is not a regular file"
DEADLOCK_OF_TWO = "recv from rank 1, tag 16383(.|\\n)*recv from rank 0, tag 16383"
DATA_SOURCE_MUST_UTF = "data.source must be UTF-8, but is 'text:.*\\\\udcff/book'"
FINITE = "that are not finite"
FORMAT_MPITRAIN_VERSION_MPITRAIN = (
    "is in format mpitrain-4, but this version of mpitrain reads mpitrain-3"
)
FORMAT_VERSION_MPITRAIN_READS = "is in format {}, but this version of mpitrain reads mpitrain-3"
HAD_LAST_UP_STEP = "10 of 12 had .* the last 10 up to step 12"
HOLDS_TOKEN_SO_DATA = "holds token 901, so data\\.vocabulary must be at least 902"
LAST_LINE_METRICS_STEP = "the last line of its metrics is of step 3"
MAKE_ROOM_THEN_START = "Make room, then start again with --resume=auto"
MISSING_GO_STEP = "{} is missing.[^$]*to go on from step-00000001"
MPITRAIN_REPORT_RUNS_MY = (
    " `mpitrain report 'runs/my run'` names the rank that the others waited for.\nIts stacks:\n"
)
MUST_INTEGERS_THOSE_STEP = "must be integers, but those of step 1 on rank 0 (localhost) are {}."
MUST_LIE_STEP = "{} must lie in 0..{}, but step 1 on rank"
MUST_LIE_STEP_RANK = "{} must lie in 0..{}, but step 2 on rank 0 (localhost) has {} at [2, 3]."
NEEDS_MOMENTUM_EMBEDDING_TOKENS = (
    "needs momentum/embedding.tokens of shape .* but the checkpoint has none"
)
RANK_LOCALHOST = "on rank {} (localhost) has {}"
RANK_NO_PROGRESS = "rank 4 on {}: no progress for "
RANK_NO_SPACE_LEFT = "On rank {}.*No space left.*"
RUN_ALREADY_HOLDS_RUN = "run already holds a run"
RUN_DELAY_NAMES_RANK = "run\\.delay names rank 2, but ranks that compute rows are 0 to 1"
STEP_LOSS_NAN = "Step 3 has loss nan"
STEP_WAITING_GRADIENT_MICRO = (
    "in step 5, waiting for the gradient of micro-batch 3: recv from rank 2, tag 7; ending the job"
)
TARGETS_MUST_LIE = "Targets must lie in 0\\.\\.2, but .* has 3 at \\[0, 0\\]"
TARGETS_MUST_SHAPE_ONE = "Targets must have the shape (4, 4), one for each prediction"
TOKENS_MUST_LIE_STEP = (
    "Tokens must lie in 0\\.\\.10, but step 1 on rank 0 \\(localhost\\) has 11 at \\[0, 0\\]"
)
TYPE_MPITRAIN_LAUNCH_TRAIN = "type: mpitrain launch -n 3 -- train --resume --out 'runs/new est'"
TYPE_MPITRAIN_TRAIN_RESUME = "type: mpitrain train --resume --out 'runs/new est'"
NO_PROCESS_LEFT = "No process of this run is left: it was killed, or it crashed."
RANK_1_NOT_MOVED = "rank 1 on localhost has not moved for "
RANK_1_ON_NODE = "rank 1 on node has not moved for "
STANDS_STILL = ": the run stands still"
STALLS = {
    "deadlock": r"in a circle: rank (0|1) on .* of rank (1|0) for \d+ s; rank (1|0) on .* of rank (0|1) for ",
    "mismatch": "different calls: rank (1|0) in .*; rank (0|1) in ",
    (
        "mismatch",
        "training of two stages",
    ): "different calls: rank 1 in a barrier, which rank 0 has not",
    "lose": r"A message is missing: rank 0 on \S+ has waited for .* of rank 1 for .*Rank 1 on \S+ has sent it",
}

"""The sentences that tests expect of `mpitrain/pipeline`."""

EVERY_CHUNK_PIPELINE_NEEDS = (
    "Every chunk of a pipeline needs a unit of the model, but there are 3 units for 4 "
    "chunks (stages x chunks)."
)
LOWER_PP_PIPELINE_CHUNKS = (
    "Lower --pp or pipeline.chunks to at most 3 chunks, or raise model.layers."
)
PARTITION_HAND_NUMBERS_LEAST = (
    "A partition by hand is 4 numbers of at least 1 that add up to 16 units, but {!r} is {}."
)
STAGE_WAITS_ACTIVATION_MICRO = (
    "stage 1 waits for the activation of micro-batch 1 for chunk 1, from stage 0"
)
STAGE_WAITS_GRADIENT_MICRO = (
    "stage 0 waits for the gradient of micro-batch 0 for chunk 0, from stage 1"
)
STAGE_WAITS_UNTIL = "stage 2 waits until stage 1 receives the gradient of micro-batch 0 for chunk 1"
STAGE_WAITS_UNTIL_STAGE = (
    "stage 0 waits until stage 1 receives the activation of micro-batch 2 for chunk 1"
)
STAGE_WAITS_UNTIL_STAGE_RECEIVES = (
    "stage 1 waits until stage 2 receives the activation of micro-batch 1 for chunk 2"
)
TRAINER_YOUR_OWN_UNITS = "A Trainer of your own units is not cut by time"

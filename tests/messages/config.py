"""The sentences that tests expect of `mpitrain/config`."""

GATHER_INT_FLOAT_PARAMETERS = "gather int8 is of float32 parameters that no rank has whole"
MUST_UTF_DCFFB = "ConfigError: {} must be UTF-8, but is 'a\\udcffb'."
REPLICATION_ZERO_NONE_REPLICATION = (
    "with replication.zero {} none has, and replication.wire is int8."
)
SAYS_AMONG_WHOM_ZERO = "says among whom ZeRO divides, but replication.zero is 0"
SEQUENCES_TOKENS_OVER_ALL = (
    "{} sequences of {} tokens over all ranks (batch.size, model.context), {} steps (run.steps)"
)
SET_REPLICATION_WIRE_FP = "Set replication.wire to fp16, bf16, int8 or none, or device.kind to cpu."
SET_REPLICATION_WIRE_NONE = "Set replication.wire to none, or replication.zero to 0 or 1."
THERE_NO_KEY_MODEL = "ConfigError: There is no key model.widht; did you mean model.width?"
WIRE_FORMAT_KEEPS_RESIDUALS = (
    "Wire format {} keeps its residuals in host memory, but device.kind is cuda."
)

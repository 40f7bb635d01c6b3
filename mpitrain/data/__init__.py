"""Data sources: deterministic samplers of a global batch, where each rank reads its own rows.

The global batch of step k depends on the seed and on k. In epochs it also depends on earlier
samples.
It does not depend on the number of ranks. Sources of a file hold out a second file or their last tenth.
Sample sources have a test set.
"""

from mpitrain.data.packing import positions_of, without_ends
from mpitrain.data.prefetch import Prefetched
from mpitrain.data.samples import SampleSource
from mpitrain.data.source import (
    DOCUMENT_END,
    IGNORED,
    Form,
    Reading,
    Request,
    Scan,
    Source,
    Unopened,
    zeros,
)
from mpitrain.data.table import (
    SOURCES,
    SourceKind,
    absolute,
    amounts,
    bits_per_byte,
    check_mixture,
    file_digests,
    names,
    open_source,
    read_rows,
    source_kind,
    spellings,
    token_files,
    tokenizer_of,
    validating,
    writes_text,
)
from mpitrain.data.token_files import LLM_C_MAGIC, TENTH, as_it_is, beside, largest_token
from mpitrain.data.tokens import TokenSource

__all__ = [
    "DOCUMENT_END",
    "IGNORED",
    "LLM_C_MAGIC",
    "SOURCES",
    "TENTH",
    "Form",
    "Prefetched",
    "Reading",
    "Request",
    "SampleSource",
    "Scan",
    "Source",
    "SourceKind",
    "TokenSource",
    "Unopened",
    "absolute",
    "amounts",
    "as_it_is",
    "beside",
    "bits_per_byte",
    "check_mixture",
    "file_digests",
    "largest_token",
    "names",
    "open_source",
    "positions_of",
    "read_rows",
    "source_kind",
    "spellings",
    "token_files",
    "tokenizer_of",
    "validating",
    "without_ends",
    "writes_text",
    "zeros",
]

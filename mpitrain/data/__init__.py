"""Data sources: deterministic samplers of a global batch, where each rank reads its own rows.

The global batch of step k does not depend on the number of ranks. It depends on the seed and on k;
with data.order=epochs it also depends on the number of earlier samples. Sources of files hold out a
second file or their last tenth. Sample sources have a test set.
"""

from mpitrain.data.prefetch import Prefetched as Prefetched
from mpitrain.data.rows import positions_of as positions_of
from mpitrain.data.rows import without_ends as without_ends
from mpitrain.data.rows import without_padding as without_padding
from mpitrain.data.source import DOCUMENT_END as DOCUMENT_END
from mpitrain.data.source import IGNORED as IGNORED
from mpitrain.data.source import Form as Form
from mpitrain.data.source import Reading as Reading
from mpitrain.data.source import Request as Request
from mpitrain.data.source import Scan as Scan
from mpitrain.data.source import Source as Source
from mpitrain.data.source import Targets as Targets
from mpitrain.data.source import Unopened as Unopened
from mpitrain.data.table import SOURCES as SOURCES
from mpitrain.data.table import SourceKind as SourceKind
from mpitrain.data.table import absolute as absolute
from mpitrain.data.table import amounts as amounts
from mpitrain.data.table import bits_per_byte as bits_per_byte
from mpitrain.data.table import file_digests as file_digests
from mpitrain.data.table import is_fraction as is_fraction
from mpitrain.data.table import names as names
from mpitrain.data.table import open_request as open_request
from mpitrain.data.table import open_source as open_source
from mpitrain.data.table import perplexity as perplexity
from mpitrain.data.table import read_rows as read_rows
from mpitrain.data.table import rows_of_epoch as rows_of_epoch
from mpitrain.data.table import source_kind as source_kind
from mpitrain.data.table import spellings as spellings
from mpitrain.data.table import targets_of as targets_of
from mpitrain.data.table import token_files as token_files
from mpitrain.data.table import tokenizer_of as tokenizer_of
from mpitrain.data.table import validating as validating
from mpitrain.data.table import writes_text as writes_text
from mpitrain.data.table import zeros as zeros
from mpitrain.data.token_files import TENTH as TENTH
from mpitrain.data.token_files import as_it_is as as_it_is
from mpitrain.data.token_files import beside as beside
from mpitrain.data.token_files import file_digest as file_digest
from mpitrain.data.token_files import largest_token as largest_token
from mpitrain.data.tokens import TokenSource as TokenSource

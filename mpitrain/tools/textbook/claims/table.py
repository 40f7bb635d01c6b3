"""The table of all claims."""

from mpitrain.tables import Table
from mpitrain.tools.textbook.claims.claim import Claim
from mpitrain.tools.textbook.claims.topics import (
    activations,
    batches,
    collectives,
    pipelines,
    servers,
    sharding,
)

CLAIMS: Table[str, Claim] = Table(
    {
        **collectives.CLAIMS,
        **servers.CLAIMS,
        **pipelines.CLAIMS,
        **sharding.CLAIMS,
        **activations.CLAIMS,
        **batches.CLAIMS,
    }
)
"""Claims by name, in the order of `mpitrain learn claims`. A new claim needs a row in its topic's file,
and the Korean of its texts.
"""

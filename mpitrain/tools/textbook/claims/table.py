"""CLAIMS: the table of all claims."""

from mpitrain.tables import Table
from mpitrain.tools.textbook.claims import experts, messages, pipelines, steps
from mpitrain.tools.textbook.claims.claim import Claim

CLAIMS: Table[str, Claim] = Table(
    {**messages.CLAIMS, **pipelines.CLAIMS, **steps.CLAIMS, **experts.CLAIMS}
)
"""Claims by name, in the order of `mpitrain learn claims`. A new claim needs a row in a file here,
and the Korean of its texts.
"""

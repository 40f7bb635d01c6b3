"""A problem that a probe finds, and the values of all ranks from which it follows."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A problem.

    host  the affected host; "" if no single host can be named
    text  the law with its values; a clause without a full stop
    """

    host: str
    text: str


class Values(NamedTuple):
    """The values of all ranks.

    hosts   host name of each rank
    values  by rank
    """

    hosts: Sequence[str]
    values: Sequence[Any]

    def by_host(self) -> dict[str, Any]:
        """Return the value of the first rank of each host."""
        return {host: self.values[self.hosts.index(host)] for host in dict.fromkeys(self.hosts)}

"""A topic: a row of the table TOPICS, with the function that records it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.machine.compiling import has_compiler
from mpitrain.tools.textbook.explain.explanation import Explanation, Text
from mpitrain.tools.textbook.explain.links import Link

MOST_RANKS = 8
"""Ranks of an explanation: more do not fit on a screen."""


class TopicSetting(NamedTuple):
    """The setting of a recording.

    ranks  threads, each one rank
    link   speed of every rank's link; None: as fast as memory
    """

    ranks: int
    link: Link | None = None


class Topic(NamedTuple):
    """Descriptor of a topic.

    title     one line
    record    (name, setting) -> the explanation, recorded from a run on threads
    ranks     the default number of ranks
    least     the smallest number of ranks
    most      the largest number of ranks
    timed     whether its frames have seconds, so that slow links show
    compiled  whether it compiles kernels for the simulator, which needs a compiler
    """

    title: Text
    record: Callable[[str, TopicSetting], Explanation]
    ranks: int = 4
    least: int = 1
    most: int = MOST_RANKS
    timed: bool = False
    compiled: bool = False

    @property
    def runs_here(self) -> bool:
        """Whether this machine has the compiler that the topic needs."""
        return not self.compiled or has_compiler()

    def setting(self, name: str, ranks: int | None, link: Link | None) -> TopicSetting:
        """Return the setting for a number of ranks; None: the default.

        raises  ConfigError if the topic cannot run on so many
        """
        count = self.ranks if ranks is None else ranks
        if not self.least <= count <= self.most:
            raise ConfigError(
                f"{name} has {self.least} to {self.most} ranks, but --ranks is {count}.",
                f"Set --ranks to {self.ranks}.",
            )
        if link and not self.timed:
            raise ConfigError(
                f"Slow links show in topics that measure time, but {name} measures none.",
                "Leave out --link, or choose ring, star or a mode of replication.",
            )
        return TopicSetting(count, link)


def listed_or_refused(name: str, names: Sequence[str]) -> str:
    """Return the name of a topic; ConfigError with all names if it is none."""
    if name in names:
        return name
    raise ConfigError(
        f"A topic is one of {', '.join(names)}, but this is {name!r}.",
        "Run `mpitrain explain` for a list.",
    )

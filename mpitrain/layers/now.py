"""Now: the rows that layers compute at this moment, for random numbers and borders of documents."""

from typing import Any, NamedTuple

from mpitrain.errors import ConfigError


class Documents(NamedTuple):
    """The documents of some rows, in the memory of the layers (as position_ids of transformers).

    starts     (B, T) int32: of each token, the first token of its document
    positions  (B, T) int32: the position of each token in its document
    """

    starts: Any
    positions: Any

    def of(self, rows: range) -> "Documents":
        """Return the documents of some of the rows, as views."""
        return Documents(*(one[rows.start : rows.stop] for one in self))


class Now:
    """The micro-batch of the running instruction, which a pipeline sets before each one.

    Both halves of backward see the values of their forward. So a dropout layer draws its mask again
    from (seed, step, row number, unit), the same in every layout.

    step    of training, from 0
    row     number of the first row within the global batch of the step
    rows    number of rows in the micro-batch
    trains  False in an evaluation and for logits, with step and row 0

    documents  of these rows; None: each row is one document
    """

    step: int
    row: int
    rows: int
    trains: bool
    documents: Documents | None = None

    def set(
        self, step: int, row: int, rows: int, trains: bool, documents: Documents | None = None
    ) -> None:
        """Set all values."""
        self.step, self.row, self.rows, self.trains = step, row, rows, trains
        self.documents = documents

    def numbers(self, count: int) -> range:
        """Return the numbers of the rows of an activation within the global batch.

        count  rows of the whole activation: `rows` samples, or rows x T tokens of sequences
        """
        first = self.row * (count // max(1, self.rows))
        return range(first, first + count)

    def __getattr__(self, name: str) -> Any:
        """Refuse values that have not been set."""
        if name not in Now.__annotations__:
            raise AttributeError(name)
        raise ConfigError(
            f"A layer reads `now.{name}` of its layer factory, but no pipeline has set it.",
            "Pass the trainer a function that makes the units, or call `now.set` first.",
        )

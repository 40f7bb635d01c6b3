"""The protocol of a data source, and a stand-in that has only its sizes.

B batch, T tokens of a context, F features, C channels, H height, W width of an image.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

Form = Literal["tokens", "samples", "images", "texts"]
"""The form of the data: rows of tokens, labelled features, labelled images, or labelled texts."""
Targets = Literal["classes", "fractions", "numbers"]
"""The targets of the data: numbers of classes, floats from 0 to 1, or any floats; NaN is ignored."""
IGNORED = -100
"""The target that does not count: the default of PyTorch's `ignore_index`."""
DOCUMENT_END = -101
"""The target of the last token of a document, with data.attend=document. It does not count."""

PADDING = -1
"""The token after the end of a labelled text, which no token of the text sees."""
SECOND = 1 << 32
"""The amount that is added to the tokens of a second text: their token type."""


class Source(Protocol):
    """The protocol of a data source: rows to train on, and held-out rows to evaluate on.

    Attributes
    ----------
    form : {"tokens", "samples", "images", "texts"}
        The form of the data. A model declares which one it takes.
    shape : tuple of int
        Shape of the inputs of one row: (T,) tokens, (F,) features, or (C, H, W) pixels.
    inputs : int
        Vocabulary size of tokens, or the number of features or pixel values of a sample.
    classes : int
        Number of classes that a prediction chooses from, or of the numbers that it has.
    targets : Targets, optional
        "classes" if absent.
    held_out : int
        Number of held-out rows.
    """

    form: Form
    shape: tuple[int, ...]
    inputs: int
    classes: int
    held_out: int

    def batch(
        self, seed: int, step: int, size: int, rows: range, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return some rows of the global batch of a step.

        Parameters
        ----------
        seed : int
            Seed of the data order.
        step : int
            Number of the step, from 0.
        size : int
            Number of rows in the global batch, over all ranks.
        rows : range
            The rows of the global batch to return; each rank passes its own.
        before : int, optional
            Number of samples in all earlier global batches. None: `step` x `size`.

        Returns
        -------
        inputs : ndarray
            (len(rows), T) int64 tokens, (len(rows), F) features, or (len(rows), C, H, W) pixels. The
            tokens of texts may be PADDING, or have SECOND added.
        targets : ndarray
            (len(rows), T) int64 classes of tokens, else (len(rows),). IGNORED does not count. With
            data.attend=document, DOCUMENT_END means that the next token begins a document. Other
            targets are floats (len(rows), ...); NaN does not count.
        """

    def held_out_rows(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return held-out rows by number.

        Parameters
        ----------
        rows : sequence of int
            Numbers from 0 to held_out - 1.

        Returns
        -------
        inputs, targets : ndarray
            In the shapes and dtypes of `batch`.
        """


class Unopened(NamedTuple):
    """The sizes of a data source without its data. A model can be built from them."""

    form: Form
    shape: tuple[int, ...]
    inputs: int
    classes: int
    held_out: int = 0


class Scan(NamedTuple):
    """The result of a scan of a token file, with the state of the file at that time.

    path        absolute path of the file
    nbytes      size of the file
    changed_ns  time of the file's last change, in ns
    largest     the largest token in the file; -1 before the scan
    dtype       of the tokens
    """

    path: str
    nbytes: int
    changed_ns: int
    largest: int
    dtype: str = "uint16"


class Reading(NamedTuple):
    """How rows are made of tokens: the keys of [data] that some sources read.

    dtype      of token files without a header: auto, uint16 or uint32
    order      of the windows of a token source: random, or epochs
    separator  the token that ends a document; -1: there are no documents
    template   of conversations: a message as text with {role} and {content}, or Jinja; empty: the
               default
    tokenizer  file of the tokenizer of conversations; empty: their tokens are bytes
    mixture    {name of a token source: its weight}
    packing    whether a row has as many conversations as fit
    attend     what a token attends to: all earlier tokens of its row (window), or those of its
               document (document)
    normalise  whether arrays are scaled to mean 0 and deviation 1
    classes    of labelled texts; 0: from the data
    labels     names of these classes; empty: from the data
    """

    dtype: str = "auto"
    order: str = "random"
    separator: int = -1
    template: str = ""
    tokenizer: str = ""
    mixture: Mapping[str, float] = {}
    packing: bool = False
    attend: str = "window"
    normalise: bool = True
    classes: int = 0
    labels: Sequence[str] = []


class Request(NamedTuple):
    """The arguments with which a data source is opened, for a row of SOURCES.

    name        of the source, as configured
    context     tokens per row of a token source
    dtype       of features and pixels
    vocabulary  of a token source; 0: 256 for text, the largest token + 1 for files of tokens
    validation  held-out rows: the name of another source; tenth or empty: the last tenth
    scan        the scan of a token file, if it is known; None costs a pass over the file
    reading     how rows are made of tokens
    form        the form that the model takes, for sources with several; None: the first of them
    targets     the targets that the loss takes
    scaling     of arrays, if it is known; None costs a pass over them
    """

    name: str
    context: int
    dtype: str
    vocabulary: int = 0
    validation: str = ""
    scan: Scan | None = None
    reading: Reading = Reading()
    form: Form | None = None
    targets: Targets = "classes"
    scaling: Mapping[str, Any] | None = None

    @property
    def place(self) -> str:
        return self.name.partition(":")[2]

    @property
    def other(self) -> str:
        """The path of the held-out file; empty if the source itself has the held-out rows."""
        return self.validation.partition(":")[2]

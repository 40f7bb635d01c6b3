"""The Layer protocol: descriptions of parameters, one forward, and two halves of backward.

    y, saved    = layer.forward(w, x, now, arena)
    dx, pending = layer.backward_input(w, dy, saved, arena)
    layer.backward_weight(pending, dw, arena)

A layer may also define both halves in one, `backward(w, dy, saved, dw, arena) -> dx`. The function
`backward` below then calls it. This is not possible where other work comes between the halves.

A method `saved_again` computes `saved` without the output (recomputed.py). With `is_rowwise` or
`forward_next` a layer can compute only new tokens (incremental.py). With an attribute `fusion` it
offers to do work of its neighbours in its own pass over memory:

    fused                            by                      offered as
    bias + residual                  linear, no activation   adds_to_output
    gradient of a norm + residual's  norm                    adds_to_input
    product * slope of a GELU        linear after a GELU     takes_gelu
    GELU + its slope                 linear with a GELU      gelu_cut

`Sequential` and `Residual` read these offers when they are made. The results equal those of
separate passes bit for bit. Bias + activation (`ops.linear_gelu`, `ops.linear_relu`) and loss +
gradient (`Loss.gradient`) are fused too, within one layer.

A layer that takes tokens has an attribute `vocab`, the number of tokens. A trainer checks that all
tokens are below it.

**Ownership of buffers.** A layer never writes to x, dy or the residual. `saved` may refer to x and
y, and `pending` to dy. A reference keeps an array alive. So the caller must not write to these
arrays before both halves have run. Two arrays are exceptions, and belong to the caller. One is
dx, to which `pending` never refers. The other is y of a layer with a true `output_is_free`. `backward_input` may
overwrite arrays that only `saved` refers to. `saved` and `pending` are each used once.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.errors import ConfigError, multiples_near
from mpitrain.machine.backend import Arena
from mpitrain.ops import Ops
from mpitrain.ops.reference.attention import first_keys
from mpitrain.regions import share

Rectangle = tuple[slice, ...]
"""A region of a tensor: one slice per dim, with start >= 0, a stop, and no step."""

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""(generator, shape) -> float64 array: the initial value of a whole tensor."""


def normal(std: float) -> Draw:
    """Return a function that draws Gaussian initial values with mean 0 and standard deviation
    `std`.
    """
    return lambda generator, shape: generator.standard_normal(shape) * std


def zeros(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return all zeros; the generator is not used."""
    return np.zeros(shape)


def ones(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return all ones; the generator is not used."""
    return np.ones(shape)


def uniform(bound: float) -> Draw:
    """Return a function that draws uniform initial values from -`bound` to `bound`."""
    return lambda generator, shape: generator.uniform(-bound, bound, shape)


class Parameter(NamedTuple):
    """A logical tensor, or the region of it on this rank.

    name       dotted, relative to the layer that lists it; independent of the layout
    shape      of the whole logical tensor
    draw       makes the initial value
    decayed    whether weight decay applies
    slices     the region on this rank, as rectangles that differ in at most one dim and are joined
               along it; queries, keys and values of some heads are three rectangles; None: the
               whole tensor
    trainable  whether the optimizer updates it
    holders    ranks of one replica with the same region: "tp" for replicated tensors, the full name
               for a tied tensor; empty: this rank alone. "ep": also this rank alone, a part of the
               experts, which not every other replica has
    partial    whether each of these ranks computes only a summand of the gradient; the summands are
               added before replicas reduce
    is_copy    whether this is a copy of a tied tensor that another stage owns and counts; its bits
               are equal
    role       "embedding" or "head": a table that optimizers for hidden matrices leave out; empty:
               any other tensor
    """

    name: str
    shape: tuple[int, ...]
    draw: Draw
    decayed: bool
    slices: tuple[Rectangle, ...] | None = None
    trainable: bool = True
    holders: str = ""
    partial: bool = False
    is_copy: bool = False
    role: str = ""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the region on this rank."""
        if self.slices is None:
            return self.shape
        shapes = [tuple(s.stop - s.start for s in rectangle) for rectangle in self.slices]
        joined = self.joined_along
        return tuple(
            sum(shape[dim] for shape in shapes) if dim == joined else length
            for dim, length in enumerate(shapes[0])
        )

    def part_of(self, whole: np.ndarray) -> np.ndarray:
        """Return this rank's region of the whole tensor."""
        if self.slices is None:
            return whole
        return np.concatenate([whole[rectangle] for rectangle in self.slices], self.joined_along)

    @property
    def joined_along(self) -> int:
        """The dim in which the rectangles differ; 0 for a single rectangle."""
        assert self.slices is not None
        first = self.slices[0]
        return next(
            (dim for other in self.slices for dim in range(len(first)) if other[dim] != first[dim]),
            0,
        )


@dataclass
class Gradient:
    """Buffer of one parameter's gradient.

    The first writer of a step overwrites the buffer, and later writers add to it.
    """

    array: np.ndarray
    filled: bool = False

    def claim(self) -> bool:
        """Announce a write, and return whether the writer must add (True) or overwrite (False)."""
        accumulate, self.filled = self.filled, True
        return accumulate


Weights = Mapping[str, Any]
"""Named views of one unit's parameters, nested by the dots of their names: w["norm"]["gain"] is an
array.
"""

Gradients = Mapping[str, Any]
"""The same nesting as `Weights`, with a Gradient at every leaf.

A frozen tensor has no leaf: `"gain" in dw["norm"]` is False, and a layer skips its gradient.
"""


class Layer(Protocol):
    """A layer without state: one forward, and backward in two halves (as torch.autograd.Function).

    A pipeline may schedule the gradients of weights later than the gradients of inputs. The head of
    this file lists optional attributes and the ownership of buffers.

    Notes
    -----
    Shapes have leading dims for rows, such as (B, T), and one dim of features at the end.
    """

    @property
    def output_is_free(self) -> bool:
        """Whether the caller may write into y at once, because `saved` does not refer to it."""

    def parameters(self) -> list[Parameter]:
        """Return the tensors that this layer computes with.

        Returns
        -------
        list of Parameter
            With names relative to this layer.
        """

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of y.

        Parameters
        ----------
        shape : tuple of int
            The shape of x.

        Returns
        -------
        tuple of int
        """

    def forward(self, w: Weights, x: np.ndarray, now: Now, arena: Arena) -> tuple[np.ndarray, Any]:
        """Compute the output.

        Parameters
        ----------
        w : Weights
            Views of this layer's parameters, by name.
        x : ndarray
            The input, which stays unchanged.
        now : Now
            The micro-batch; what a backward needs of it is a part of `saved`.
        arena : Arena
            Allocates y and scratch.

        Returns
        -------
        y : ndarray
            Of shape `output_shape(x.shape)`.
        saved : object
            The state for one call of `backward_input`.
        """

    def backward_input(
        self, w: Weights, dy: np.ndarray, saved: Any, arena: Arena
    ) -> tuple[np.ndarray | None, Any]:
        """Compute the gradient of the input.

        Parameters
        ----------
        w : Weights
            As in `forward`.
        dy : ndarray
            The gradient of y, which stays unchanged.
        saved : object
            The second result of `forward`.
        arena : Arena
            Allocates dx and scratch.

        Returns
        -------
        dx : ndarray or None
            Of the shape of x; None if the input has no gradient, as tokens.
        pending : object
            The state for one call of `backward_weight`.
        """

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        """Write the gradients of the parameters, or add to them.

        Parameters
        ----------
        pending : object
            The second result of `backward_input`.
        dw : Gradients
            One `Gradient` for each parameter that is not frozen. `Gradient.claim` decides between
            writing and adding.
        arena : Arena
            Allocates scratch.
        """


def backward(
    layer: Any, w: Weights, dy: Any, saved: Any, dw: Gradients, arena: Arena, fused: Any = None
) -> Any:
    """Run both halves of a layer's backward, by its own `backward` if it has one.

    fused    the last argument of a fused call (`Fusion`); None: the call is not fused
    returns  dx, or None if the input has no gradient
    """
    # Unpacking arguments from a tuple would keep `saved` alive.
    if own := getattr(layer, "backward", None):
        return (
            own(w, dy, saved, dw, arena) if fused is None else own(w, dy, saved, dw, arena, fused)
        )
    half = layer.backward_input
    dx, pending = half(w, dy, saved, arena) if fused is None else half(w, dy, saved, arena, fused)
    del saved  # the weight half may reuse these buffers
    layer.backward_weight(pending, dw, arena)
    return dx


class Fusion(NamedTuple):
    """The fused calls that a layer offers. The first three have one more argument, after the arena.

    adds_to_output  forward(w, x, now, arena, residual): y includes the residual in its sum
    adds_to_input   backward_input(w, dy, saved, arena, residual): dx includes it; `backward` alike
    takes_gelu      backward_input(w, dy, saved, arena, slope), of a layer with input x = gelu(z):
                    returns dz in place of dx, and may write over the slope; `backward` alike
    gelu_cut        this layer, y = gelu(z), without its GELU: with the same weights, and output z. So
                    the next layer can compute the backward of the GELU. The layer itself saves
                    (what this one saves, slope), where the slope is the GELU's derivative at z
    """

    adds_to_output: bool = False
    adds_to_input: bool = False
    takes_gelu: bool = False
    gelu_cut: Layer | None = None


def fusion_of(layer: Any) -> Fusion:
    return getattr(layer, "fusion", Fusion())


def flat_rows(x: Any) -> Any:
    """Return (..., C) reshaped to (rows, C)."""
    return x.reshape(-1, x.shape[-1])


class WholeRows:
    """What a layer asks of the ranks that divide it (layout.tp): here one rank has all of it.

    Then there is nothing to sum or to gather. `ReplicatedRows` and `SequenceSharded` in
    parallel/tensor/rows.py have the same methods for a group of ranks.

    rank, ranks  of the group
    holders      as `Parameter.holders`, of tensors that all ranks hold
    partial      whether each rank computes only a summand of the gradient of a replicated norm:
                 False, since every rank has all rows
    """

    holders, partial = "", False

    def __init__(self, rank: int = 0, ranks: int = 1):
        self.rank, self.ranks = rank, ranks

    def share(self, count: int) -> range:
        """Return this rank's run of `count` things; the runs of the ranks may differ by one."""
        return share(count, self.rank, self.ranks)

    def run(self, count: int, what: str) -> range:
        """Return this rank's run of `count` things, which the ranks share equally.

        what    plural of the things for the message, such as "heads"
        raises  ConfigError if `count` does not divide by the number of ranks
        """
        if count % self.ranks:
            raise ConfigError(
                f"{self.ranks} ranks share the {what} of a layer, but {count} do not divide by {self.ranks}.",
                f"Nearest that do: {multiples_near(count, self.ranks)}.",
            )
        return self.share(count)

    def summed(
        self,
        product: Callable[..., tuple[Any, Any]],
        shape: Sequence[int],
        dtype: Any,
        arena: Arena,
        *,
        bias: Any = None,
        residual: Any = None,
        add_bias: Callable[..., None] | None = None,
        beside: Callable[[Any], None] = lambda state: None,
    ) -> tuple[Any, Any]:
        """Return the sum of the ranks' products, plus bias and residual, and the state of the product.

        product   (out, bias, residual) -> (rows, state): writes this rank's summand (rows, C) to
                  `out`, plus bias and residual if they are not None
        shape     of the sum, (..., C) with all rows
        add_bias  the operation that adds bias and residual after a sum of several ranks
        beside    takes the state, and computes while the ranks sum
        """
        y, state = product(None, bias, None if residual is None else flat_rows(residual))
        beside(state)
        return y.reshape(shape), state

    def gathered(self, own: Any, arena: Arena) -> Any:
        """Return all columns (..., K) from those of this rank, (..., K / n)."""
        return own

    def columns_of(self, whole: Any, arena: Arena) -> Any:
        """Return this rank's columns (..., K / n) of all, (..., K)."""
        return whole

    def whole(self, x: Any) -> Any:
        """Return all rows of x, the input of a layer, as sequences (B, T, C)."""
        return x

    def own(self, x: Any) -> Any:
        """Return this rank's rows, between layers, of all rows (M, C)."""
        return x

    def kept(self, saved: Any, x: Any, now: Now) -> Any:
        """Return the state to save for backward.

        saved  state of a product, with all rows of its input
        x      this rank's rows of that input, which may replace all rows in the state
        """
        return saved

    def regained(self, saved: Any) -> Any:
        """Return the state with all rows of the input, from a state that `kept` returned."""
        return saved

    def entered(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape (B, T, C) of all rows inside a layer, for a shape between layers."""
        return tuple(shape)

    def left(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape between layers, for a shape of all rows inside a layer."""
        return tuple(shape)

    def cross_entropy(self, ops: Ops, vocab: int, smoothing: float) -> Loss | None:
        """Return the cross-entropy of this rank's columns of the logits; None: it has all columns."""
        return None

    def filled(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return an input shape (B, T), no smaller than this one, whose rows divide among the ranks."""
        return tuple(shape)


ALL_ROWS = WholeRows()


class TokenShare(NamedTuple):
    """The tokens that a rank of a context-parallel group has of every row.

    A rank has the rank-th run of them. With `is_ring` it has two runs of 2 x ranks: the rank-th, and
    the rank-th from the end (zigzag). Then all ranks have equal work in causal attention.
    """

    rank: int = 0
    ranks: int = 1
    is_ring: bool = False

    @property
    def chunks(self) -> int:
        """The number of runs that all ranks have together."""
        return self.ranks * (1 + self.is_ring)

    def runs(self, tokens: int) -> list[range]:
        """Return this rank's runs of the indices in a row of so many tokens."""
        each, numbers = tokens // self.chunks, [self.rank, self.chunks - 1 - self.rank]
        return [range(n * each, (n + 1) * each) for n in numbers[: 1 + self.is_ring]]

    def of(self, tokens: int) -> np.ndarray:
        """Return the indices in the row of this rank's tokens, for rows of so many tokens."""
        return np.concatenate([np.arange(run.start, run.stop) for run in self.runs(tokens)])

    def cut(self, rows: np.ndarray) -> np.ndarray:
        """Return this rank's tokens (B, T / ranks) of rows (B, T), contiguous; one rank has all of any rows."""
        if self.ranks == 1:
            return rows
        return np.concatenate([rows[:, n.start : n.stop] for n in self.runs(rows.shape[1])], 1)

    def seen(self, source: int, own: int, window: int = 0) -> tuple[slice, slice]:
        """Return this rank's queries that see tokens of another rank of a ring, and these tokens.

        Without a window every one of these queries sees all of them; of its own tokens a rank sees
        those before. If it sees none of the other rank's, both are empty.

        own     number of tokens that each rank has
        window  the most tokens that a query sees, the last up to its own; 0: all up to its own
        """
        tokens, queries, keys = own * self.ranks, [own], list[int]()
        reach, theirs = window or tokens, self._replace(rank=source).runs(own * self.ranks)
        for i, mine in enumerate(self.runs(tokens)):
            for j, run in enumerate(theirs):
                seeing = range(max(mine.start, run.start), min(mine.stop, run.stop + reach - 1))
                seen = range(max(run.start, mine.start - reach + 1), min(run.stop, mine.stop))
                if seeing and seen:
                    queries.append(seeing.start - mine.start + i * len(mine))
                    keys += [each - run.start + j * len(run) for each in (seen.start, seen.stop)]
        return slice(min(queries), own), slice(min(keys, default=0), max(keys, default=0))

    def steps(self, tokens: int, window: int = 0) -> list[int]:
        """Return the steps of a ring in which some rank sees tokens of the rank so many before it.

        tokens  of a row
        window  as in `seen`
        """
        every, own = range(self.ranks), tokens // self.ranks

        def sees(rank: int, source: int) -> bool:
            _, keys = self._replace(rank=rank).seen(source % self.ranks, own, window)
            return keys.start < keys.stop

        return [step for step in every if any(sees(rank, rank - step) for rank in every)]

    def firsts(self, starts: np.ndarray, window: int = 0) -> list[np.ndarray]:
        """Return, for each rank, the first of the keys of `seen` that each of its queries sees.

        (B, Q) int32 each; the number of these keys: the query sees none

        starts  (B, T), of each token: the first token of its document
        window  as in `seen`
        """
        mine, found = self.cut(first_keys(starts, window)), []
        for source in range(self.ranks):
            queries, keys = self.seen(source, mine.shape[1], window)
            theirs = self._replace(rank=source).of(starts.shape[1])[keys]
            found.append(theirs.searchsorted(mine[:, queries]).astype(np.int32))
        return found


ALL_TOKENS = TokenShare()


class Places(NamedTuple):
    """The places of some rows' tokens, in the memory of the layers (as position_ids of transformers).

    starts     (B, T) int32: the index in the row of the first token of each token's document; None:
               each row is one document
    firsts     of a ring {window: for each rank, the index among its tokens of the first that this
               rank's queries see, `TokenShare.firsts`}; without an entry they see all
    positions  (B, T) int32: the position of each token in its document; None: its index in the row
    own        (B, T / ranks) int32: the positions of this rank's tokens (`TokenShare`)
    types      (B, T) int32: the token types; None: all are 0
    """

    starts: Any
    positions: Any
    own: Any
    types: Any = None
    firsts: Mapping[int, list[Any]] = {}

    def of(self, rows: range) -> Places:
        """Return the places of the tokens of some of the rows, as views."""
        part = slice(rows.start, rows.stop)
        starts, positions, own, types = (None if one is None else one[part] for one in self[:4])
        firsts = {window: [one[part] for one in each] for window, each in self.firsts.items()}
        return Places(starts, positions, own, types, firsts)


class Now(NamedTuple):
    """The micro-batch that a forward computes.

    A dropout layer saves it, and draws its mask again from (seed, step, row number, layer number);
    the mask is the same in every layout.

    step      of training, from 0
    row       number of the first row within the global batch of the step
    rows      number of rows in the micro-batch
    trains    False in an evaluation and for logits, with step and row 0
    places    of the tokens of these rows; None: each row is one document, all of it on this rank
    is_again  whether this forward is computed again, just before its backward
    weight    for layers that add to the loss: the factor of a target in its gradient, times the
              fraction of the row's targets that count; (rows, 1) in the device's memory, or None
    """

    step: int
    row: int
    rows: int
    trains: bool
    places: Places | None = None
    is_again: bool = False
    weight: Any = None

    def numbers(self, count: int, share: TokenShare = ALL_TOKENS) -> range | np.ndarray:
        """Return the numbers of the rows of an activation within the global batch, a range without
        context parallelism.

        count  rows of the activation on all tensor-parallel ranks: `rows` samples, or the tokens
               that this rank has of each of `rows` sequences
        share  which tokens of every row this rank has
        """
        each = count // max(1, self.rows)
        if share.ranks == 1:
            return range(self.row * each, self.row * each + count)
        whole = each * share.ranks
        rows = np.arange(self.row, self.row + self.rows)
        return (rows[:, None] * whole + share.of(whole)).reshape(-1)


READING = Now(0, 0, 1, False)
"""Of new tokens over a key-value cache."""


class Loss(Protocol):
    """The loss of logits (N, V) and their target classes (N,).

    Sums over rows are numbers, or arrays without dims that the device may still compute.
    """

    def gradient(
        self, logits: np.ndarray, targets: np.ndarray, scale: float, arena: Arena
    ) -> tuple[Any, np.ndarray]:
        """Compute the summed loss and the gradient of the logits.

        Parameters
        ----------
        logits : ndarray
            (N, V). The gradient may overwrite them.
        targets : ndarray
            (N,) int64, from 0 to V - 1.
        scale : float
            Factor of the gradient, but not of the returned loss.
        arena : Arena
            Allocates scratch.

        Returns
        -------
        loss : number or array without dims
            The sum over all rows.
        dlogits : ndarray
            (N, V), the gradient of scale times the sum.
        """

    def value(self, logits: np.ndarray, targets: np.ndarray, arena: Arena) -> Any:
        """Compute only the summed loss.

        Parameters
        ----------
        logits, targets, arena
            As in `gradient`, but the logits stay unchanged.

        Returns
        -------
        number or array without dims
        """

    def correct(self, logits: np.ndarray, targets: np.ndarray, arena: Arena) -> Any:
        """Count the rows that have their largest logit at the target.

        Parameters
        ----------
        logits, targets, arena
            As in `gradient`, but the logits stay unchanged.

        Returns
        -------
        number or array without dims
        """


@dataclass(frozen=True, eq=False)
class Unit:
    """One entry of a model's list of layers (as a module that FSDP wraps).

    ZeRO gathers a unit, and a pipeline places it, as a whole.

    Parameters
    ----------
    name : str
        Prefix of the full names of the parameters: unit "hidden" with a linear layer has
        "hidden.weight".
    layer : Layer
        For example one that `Plain` constructs.
    tied : mapping, optional
        {parameter of this layer: full name of a tensor in an earlier unit}: the layer uses that
        tensor instead.
    held : mapping, optional
        {parameter of this layer: description of the tensor that this unit stores for it}. A
        pipeline sets it for tied tensors on several stages.
    frozen : collection of str, optional
        Set by model.freeze: names of parameters.
    segment : sequence of str, optional
        Set by memory.recompute: names of consecutive units that are computed again together.
    """

    name: str
    layer: Layer
    tied: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, Parameter] = field(default_factory=dict)
    frozen: Collection[str] = field(default_factory=frozenset)
    segment: Sequence[str] = ()

    def full_name(self, parameter: Parameter) -> str:
        """Return the full name of a parameter's tensor; a tied tensor has that of another unit."""
        return self.tied.get(parameter.name, f"{self.name}.{parameter.name}")


def are_units(made: Any) -> bool:
    is_list = isinstance(made, Sequence) and len(made) > 0
    return is_list and all(isinstance(unit, Unit) for unit in made)


def parameters_of(unit: Unit) -> list[Parameter]:
    """Return the parameters of a unit's layer; `trainable` is False for those in `unit.frozen`."""
    return [
        p._replace(trainable=False) if p.name in unit.frozen else p for p in unit.layer.parameters()
    ]


def freeze(units: Sequence[Unit], patterns: Sequence[str]) -> list[Unit]:
    """Return the units, with `frozen` naming each tensor that matches a pattern.

    `frozen` also names the tensors that their layer or unit describes as not trainable.

    patterns  of full names, as fnmatch takes them; a tied tensor has the name of its first unit
    raises    ConfigError for a pattern without a match, or if no tensor is left to train
    """
    return _frozen(units, patterns) if patterns or not all_trained(units) else list(units)


def all_trained(units: Sequence[Unit]) -> bool:
    return all(p.trainable for unit in units for p in parameters_of(unit))


def _frozen(units: Sequence[Unit], patterns: Sequence[str]) -> list[Unit]:
    tensors = {
        unit.full_name(p): p
        for unit in units
        for p in parameters_of(unit)
        if p.name not in unit.tied
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            raise ConfigError(
                "Each pattern of model.freeze matches the full name of a parameter, but "
                f"{pattern!r} matches none of {len(tensors)}.",
                f"The names go from {next(iter(tensors), '')} to {next(reversed(tensors), '')}.",
            )
    frozen = {
        name
        for name, p in tensors.items()
        if not p.trainable or any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if frozen and len(frozen) == len(tensors):
        raise ConfigError(
            f"Training needs a parameter that is not frozen, but all {len(tensors)} are.",
            "Take a pattern out of model.freeze.",
        )
    if not frozen:
        return list(units)
    return [
        replace(
            unit, frozen={p.name for p in unit.layer.parameters() if unit.full_name(p) in frozen}
        )
        for unit in units
    ]


def forward_only(units: Sequence[Unit]) -> int:
    """Return the number of units before the first trained tensor, which need no backward.

    It is 0 if no tensor is frozen.
    """
    if all_trained(units):
        return 0
    return next(
        (n for n, unit in enumerate(units) if any(p.trainable for p in parameters_of(unit))),
        len(units),
    )

"""Tensor-wise rules: sums over whole tensors, results of whole tensors, and updates from both.

The sums that a rule needs, such as squared norms, are its *facts*. The elements of a tensor may be
on several ranks, so an update has three phases:

    add     each rank adds the terms of its own elements to a flat float64 vector of all facts
    sum     one all-reduce of this vector, over the ranks with other elements of the same tensors
    apply   each rank updates its elements from the sums, which have the same bits on all ranks

A rule may also compute on whole tensors (`Whole`). One rank computes each tensor.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mpitrain import config
from mpitrain.layers.base import Parameter
from mpitrain.layers.flat import Entry, Storage
from mpitrain.machine.backend import Backend
from mpitrain.optim.optimizer import (
    Arrays,
    FactSums,
    HyperParameters,
    Optimizer,
    Rule,
    Shape,
    StateBuffer,
    Update,
    elements,
    group_of,
)
from mpitrain.regions import Piece, overlap
from mpitrain.transport.base import Request, Transport


@dataclass(frozen=True)
class ElementsOf:
    """The tensor's own shape, as `elements`, for some tensors; other tensors have no such state.

    of  (tensor) -> whether it has such state
    """

    of: Callable[[Parameter], bool]

    def __call__(self, tensor: Parameter) -> tuple[int, ...] | None:
        return tensor.shape if self.of(tensor) else None


class MatrixBlock(NamedTuple):
    """Elements [start, stop) of a `TensorPiece`, which form an (R, C) matrix, row-major.

    rows     (R,) indices of its rows in the whole tensor, with all dims but the last flattened;
             in the memory of the backend
    columns  (C,) indices of its columns in the whole tensor, there too
    """

    start: int
    stop: int
    rows: Any
    columns: Any


class TensorPiece(NamedTuple):
    """The elements of one tensor that this rank updates.

    tensor      the whole tensor, and its region on this rank
    parameters  (count,), in place
    gradients   (count,), to be multiplied by `Update.scale`
    mirror      (count,), or None; `apply` writes the rounded parameters to it
    state       {name: buffer}: (count,) if the shape is `elements` or `ElementsOf`; any other
                buffer is whole, in its own shape
    facts       {name: sum over the whole tensor}, float64, of this and all earlier rounds
    blocks      the same `count` elements as matrices; at most three
    result      (count,), the result of `TensorWise.whole`; None if the tensor has none
    """

    tensor: Parameter
    parameters: Any
    gradients: Any
    mirror: Any
    state: Mapping[str, Any]
    facts: Mapping[str, Any]
    blocks: Sequence[MatrixBlock]
    result: Any = None


class Round(NamedTuple):
    """Facts (sums over whole tensors) that one all-reduce sums.

    facts  {name: shape of the sum}
    add    (piece, update): adds the terms of the piece's elements to `piece.facts`, which are 0
           before the first piece. `add` may change the state, and the facts of earlier rounds: an
           update that has begun is not skipped.
    """

    facts: Mapping[str, Shape]
    add: Callable[[TensorPiece, Update], None]


class Whole(NamedTuple):
    """A computation on whole tensors: one rank computes, even if several ranks have the elements.

    of       (tensor) -> whether the computation applies to it
    operand  (piece, update, out): writes the operand of this rank's elements to out (count,). It
             may change state of the shape `elements`
    compute  (operand, update): overwrites an operand, in the tensor's shape, by the result
    """

    of: Callable[[Parameter], bool]
    operand: Callable[[TensorPiece, Update, Any], None]
    compute: Callable[[Any, Update], None]


class TensorWise(NamedTuple):
    """The step of a rule that needs facts (sums over whole tensors), or whole tensors.

    rounds  in the order in which they run; a round has the facts of all earlier rounds
    apply   (piece, update): updates the parameters. It runs once for each tensor of which this rank
            updates an element. State that ranks store whole must be computed only from such state
            and from facts, so that it has the same bits on all ranks.
    whole   its result is `piece.result` in `apply`; such a rule runs without tensor parallelism
    """

    rounds: Sequence[Round]
    apply: Callable[[TensorPiece, Update], None]
    whole: Whole | None = None

    @property
    def optimizer(self) -> type[Optimizer]:
        return TensorOptimizer


Elements = tuple[int, int]
"""Elements [start, stop) of a flattened tensor."""


def laid_out(entries: Iterable[Entry], shape: Shape, start: int = 0) -> list[Entry]:
    """Return the layout of a buffer with an array of this shape for each tensor, from `start` on."""
    layout: list[Entry] = []
    for entry in entries:
        dims = shape(entry.parameter)
        if dims is not None:
            whole = entry.parameter._replace(shape=dims, slices=None)
            layout.append(Entry(entry.name, whole, entry.unit, start))
            start = layout[-1].stop
    return layout


def touched(storage: Storage, piece: Piece) -> list[Entry]:
    """Return the tensors with elements in a piece."""
    return [entry for entry in storage.entries if overlap(entry, piece)]


class StateLayout(NamedTuple):
    """The layout of a buffer of optimizer state.

    length           elements of the buffer
    pieces, entries  as in `StateBuffer`
    tensors          {tensor: (offset, shape of its view)}; None: the buffer has one element for
                     each element of the pieces, in their order
    """

    length: int
    pieces: Sequence[Piece]
    entries: Sequence[Entry] = ()
    tensors: Mapping[str, tuple[int, tuple[int, ...]]] | None = None

    def views(self, buffer: Any) -> dict[str, Any]:
        """Return {tensor: its view of a buffer}; empty if `tensors` is None."""
        return {
            name: buffer[start : start + math.prod(shape)].reshape(shape)
            for name, (start, shape) in (self.tensors or {}).items()
        }


def layout_of(shape: Shape, storage: Storage, pieces: Sequence[Piece]) -> StateLayout:
    if shape is elements:
        return StateLayout(sum(piece.stop - piece.start for piece in pieces), pieces)
    if isinstance(shape, ElementsOf):
        return _elements_of(shape, storage, pieces)
    own = {entry.name: entry for piece in pieces for entry in touched(storage, piece)}
    entries = laid_out(own.values(), shape)
    count = entries[-1].stop if entries else 0
    tensors = {entry.name: (entry.start, entry.parameter.shape) for entry in entries}
    return StateLayout(count, [Piece(0, count, 0)], entries, tensors)


def _elements_of(shape: ElementsOf, storage: Storage, pieces: Sequence[Piece]) -> StateLayout:
    by_tensor, length = dict[str, Piece](), 0
    for piece in pieces:
        for entry in touched(storage, piece):
            if shape(entry.parameter) is not None:
                both = overlap(entry, piece)
                by_tensor[entry.name] = Piece(both.start, both.stop, length)
                length += len(both)
    tensors = {name: (own.offset, (own.stop - own.start,)) for name, own in by_tensor.items()}
    return StateLayout(length, list(by_tensor.values()), tensors=tensors)


class Divided(NamedTuple):
    """A tensor whose elements are on several ranks. Its owner, one of them, computes the result.

    array   on the owner the whole operand, later the whole result; elsewhere this rank's elements
    own     the elements of this rank
    others  on the owner {other rank: its elements}; elsewhere empty
    """

    tensor: Parameter
    array: Any
    own: Elements
    owner: int
    others: Mapping[int, Elements]

    @property
    def is_owner(self) -> bool:
        return bool(self.others)

    @property
    def elements(self) -> Any:
        """This rank's elements, (count,)."""
        return self.array[slice(*self.own)] if self.is_owner else self.array


class Results:
    """Operands and results of `Whole.compute`, for tensors whose elements are on several ranks.

    tensors  {full name: tensor}
    """

    def __init__(
        self,
        own: Mapping[str, tuple[Parameter, Elements]],
        dtype: Any,
        backend: Backend,
        transport: Transport | None,
    ):
        """Agree on the owners, and allocate; collective over the transport.

        own        {full name: (tensor, its elements on this rank)}
        transport  the ranks with other elements of the same tensors; None: no other rank has any
        """
        self.tensors: dict[str, Divided] = {}
        if transport is None:
            return
        self._transport = transport
        with transport.recorder.called("whole tensors"):
            self._tag = transport.claim_tag()
        listed = [
            [name, *elements, _cost(tensor.local_shape)] for name, (tensor, elements) in own.items()
        ]
        for name, owner, ranks in _owners(transport.gather_text(listed)):
            if transport.rank not in ranks:
                continue
            tensor, elements = own[name]
            is_owner = owner == transport.rank
            count = (
                max(stop for _, stop in ranks.values()) if is_owner else elements[1] - elements[0]
            )
            self.tensors[name] = Divided(
                tensor,
                backend.zeros(count, dtype),
                elements,
                owner,
                {rank: ranks[rank] for rank in ranks if rank != owner} if is_owner else {},
            )

    def run(self, compute: Callable[[Any], None]) -> None:
        """Replace the operands by the results; collective over the ranks of each tensor.

        compute  (operand in the tensor's shape): overwrites it by the result
        """
        self._exchange(to_owner=True)
        for divided in self.tensors.values():
            if divided.is_owner:
                compute(divided.array.reshape(divided.tensor.local_shape))
        self._exchange(to_owner=False)

    def _exchange(self, to_owner: bool) -> None:
        requests = list[Request]()
        for divided in self.tensors.values():
            start = (
                self._transport.start_recv
                if divided.is_owner == to_owner
                else self._transport.start_send
            )
            peers = divided.others.items() if divided.is_owner else [(divided.owner, None)]
            for rank, own in peers:
                array = divided.array if own is None else divided.array[slice(*own)]
                requests.append(start(array, rank, self._tag))
        for request in requests:
            request.wait()


def _cost(shape: Sequence[int]) -> int:
    """Return a number in proportion to the time of multiplying a matrix by its transpose."""
    cost = min(shape)
    for length in shape:
        cost *= length
    return cost


def _owners(
    everyone: Sequence[Iterable[Sequence[Any]]],
) -> Iterator[tuple[str, int, dict[int, Elements]]]:
    """Yield (full name, owner, {rank: elements}) of each tensor with elements on several ranks.

    All ranks get the same order, the costliest tensor first. The owner of a tensor is the least
    loaded of its ranks.

    everyone  for each rank, the (full name, start, stop, cost) of each tensor with elements there
    """
    ranks, costs = dict[str, dict[int, Elements]](), dict[str, int]()
    for rank, listed in enumerate(everyone):
        for name, start, stop, cost in listed:
            ranks.setdefault(name, {})[rank] = start, stop
            costs[name] = cost
    loads = [0] * len(everyone)
    for name, holders in ranks.items():
        if len(holders) == 1:
            loads[next(iter(holders))] += costs[name]
    divided = [name for name, holders in ranks.items() if len(holders) > 1]
    for name in sorted(divided, key=lambda name: (-costs[name], name)):
        owner = min(ranks[name], key=lambda rank: (loads[rank], rank))
        loads[owner] += costs[name]
        yield name, owner, ranks[name]


def blocks(tensor: Parameter, start: int, stop: int) -> list[MatrixBlock]:
    """Divide elements [start, stop) of a tensor's flattened region into matrices.

    The matrices are the end of a row, whole rows, and the beginning of a row. A vector is one row.
    """
    *lead, columns = [_indices(tensor, dim) for dim in range(len(tensor.shape))] or [np.arange(1)]
    rows = np.zeros(1, np.int64)
    for dim, indices in enumerate(lead):
        rows = np.add.outer(rows * tensor.shape[dim], indices).reshape(-1)
    width, first, matrices = len(columns), start, list[MatrixBlock]()
    while start < stop:
        row, column = divmod(start, width)
        whole = 0 if column else (stop - start) // width  # rows
        end = start + whole * width if whole else min(stop, (row + 1) * width)
        matrices.append(
            MatrixBlock(
                start - first,
                end - first,
                rows[row : row + max(1, whole)],
                columns[column : column + end - start],
            )
        )
        start = end
    return matrices


def _indices(tensor: Parameter, dim: int) -> np.ndarray:
    """Return the index in the whole tensor of each index of a dim of its region on this rank."""
    if tensor.slices is None:
        return np.arange(tensor.shape[dim])
    indices = [np.arange(rectangle[dim].start, rectangle[dim].stop) for rectangle in tensor.slices]
    return np.concatenate(indices) if dim == tensor.joined_along else indices[0]


class _Fragment(NamedTuple):
    """The elements of one tensor in a piece.

    start, stop  the elements [start, stop), counted from the beginning of the piece
    elements     the same elements, counted from the beginning of the tensor's region
    group        the values of the tensor's parameter group
    settings     the section [optimizer] with the weight decay of this group
    """

    entry: Entry
    start: int
    stop: int
    elements: Elements
    blocks: Sequence[MatrixBlock]
    group: HyperParameters
    settings: config.Optimizer


class _Sums(NamedTuple):
    """The facts of all tensors of one round, and their all-reduce.

    vector     (count,) float64, all facts
    views      {fact: {tensor: its view of the vector}}
    uncounted  views that this rank sets to 0 before the sum: another rank adds the same elements
    run        the all-reduce of the vector
    """

    vector: Any
    views: Mapping[str, Mapping[str, Any]]
    uncounted: Sequence[Any]
    run: Callable[[], None]


class TensorOptimizer(Optimizer):
    """The optimizer of a tensor-wise rule; `bound` has (piece, fragment) for each tensor in a piece.

    state  {name: buffer}, 1-D. Its contents depend on the shape in `Rule.state`:
           elements    as in `Optimizer`
           ElementsOf  the same, for some of the tensors
           any other   one small whole array for each tensor with an element in a piece
    """

    @classmethod
    def state_bytes(cls, rule: Rule, storage: Storage) -> float:
        others = [
            shape(entry.parameter)
            for entry in storage.entries
            for shape in rule.state.values()
            if shape is not elements
        ]
        count = sum(math.prod(shape) for shape in others if shape is not None)
        return super().state_bytes(rule, storage) + storage.dtype.itemsize * count

    def allocate(self, sums: Callable[[], FactSums]) -> None:
        """Allocate the state and the vectors of sums, and bind their all-reduces; collective."""
        storage, backend, step, summing = self.storage, self.backend, self.step, sums()
        self.layouts = {
            name: layout_of(shape, storage, self.pieces) for name, shape in self.rule.state.items()
        }
        self.state = {
            name: backend.zeros(layout.length, storage.dtype)
            for name, layout in self.layouts.items()
        }
        # {name: {tensor: its view}} of the buffers that have `StateLayout.tensors`.
        self._by_tensor = {
            name: layout.views(self.state[name])
            for name, layout in self.layouts.items()
            if layout.tensors is not None
        }
        self._fragments = {
            piece: [
                _fragment(entry, piece, self.settings, backend) for entry in touched(storage, piece)
            ]
            for piece in self.pieces
        }
        everything = touched(storage, Piece(0, storage.length, 0))
        self._sums = [_bound(each.facts, everything, backend, summing) for each in step.rounds]
        self._results = Results(
            {
                fragment.entry.name: (fragment.entry.parameter, fragment.elements)
                for fragments in self._fragments.values()
                for fragment in fragments
                if step.whole and step.whole.of(fragment.entry.parameter)
            },
            storage.dtype,
            backend,
            summing.shards if step.whole else None,
        )

    def buffers(self) -> list[StateBuffer]:
        return [
            buffer._replace(pieces=layout.pieces, entries=layout.entries)
            for buffer, layout in zip(super().buffers(), self.layouts.values(), strict=True)
        ]

    def bind(self, arrays: Arrays) -> Mapping[Piece, Sequence[tuple[TensorPiece, _Fragment]]]:
        return {
            piece: [
                (self._piece(piece, fragment, *arrays[piece]), fragment) for fragment in fragments
            ]
            for piece, fragments in self._fragments.items()
        }

    def _piece(
        self, piece: Piece, fragment: _Fragment, parameters: Any, gradients: Any, mirror: Any
    ) -> TensorPiece:
        entry, start, stop, _, blocks, group, _ = fragment
        along = slice(piece.offset + start, piece.offset + stop)
        return TensorPiece(
            entry.parameter._replace(decayed=group.weight_decay > 0),
            parameters[start:stop],
            gradients[start:stop],
            None if mirror is None else mirror[start:stop],
            {
                name: buffer[along]
                for name, buffer in self.state.items()
                if name not in self._by_tensor
            }
            | _of(self._by_tensor, entry.name),
            {
                name: array
                for sums in self._sums
                for name, array in _of(sums.views, entry.name).items()
            },
            blocks,
        )

    def update(
        self,
        scale: float,
        lr: float,
        step: int,
        delayed: bool = False,
        updated: Callable[[Piece], object] | None = None,
    ) -> None:
        update = Update(self.settings, self.ops, self.arena, scale, lr, step, delayed)
        pieces = list(chain.from_iterable(self.bound.values()))
        for each, sums in zip(self.step.rounds, self._sums, strict=True):
            sums.vector.fill(0)
            for piece, fragment in pieces:
                each.add(piece, _in_group(update, fragment))
            for view in sums.uncounted:
                view.fill(0)
            sums.run()
        if self._results.tensors:
            self._run_divided(pieces, update)
        for of_rank, fragments in self.bound.items():
            for piece, fragment in fragments:
                own = _in_group(update, fragment)
                self.step.apply(self._with_result(piece, fragment.entry.name, own), own)
            if updated:
                updated(of_rank)

    def _run_divided(self, pieces: Iterable[tuple[TensorPiece, _Fragment]], update: Update) -> None:
        """Compute the results of whole tensors whose elements are on several ranks; collective."""
        whole, divided = self.step.whole, self._results.tensors
        for piece, fragment in pieces:
            if fragment.entry.name in divided:
                operand = divided[fragment.entry.name].elements
                whole.operand(piece, _in_group(update, fragment), operand)
        self._results.run(lambda operand: whole.compute(operand, update))

    def _with_result(self, piece: TensorPiece, name: str, update: Update) -> TensorPiece:
        whole = self.step.whole
        if whole is None or not whole.of(piece.tensor):
            return piece
        if name in self._results.tensors:
            return piece._replace(result=self._results.tensors[name].elements)
        result = update.arena.take(piece.gradients.shape, piece.gradients.dtype)
        whole.operand(piece, update, result)
        whole.compute(result.reshape(piece.tensor.local_shape), update)
        return piece._replace(result=result)


def _bound(
    facts: Mapping[str, Shape], entries: Sequence[Entry], backend: Backend, sums: FactSums
) -> _Sums:
    layouts, length = dict[str, list[Entry]](), 0
    for name, shape in facts.items():
        layouts[name] = laid_out(entries, shape, length)
        length = max([length, *(entry.stop for entry in layouts[name])])
    vector = backend.zeros(length, np.float64)
    uncounted = [
        entry.view(vector)
        for layout in layouts.values()
        for entry in layout
        if not sums.counts(entry.parameter.holders)
    ]
    views = {name: _views(layout, vector) for name, layout in layouts.items()}
    return _Sums(vector, views, uncounted, sums.bind(vector))


def _views(layout: Sequence[Entry], array: Any) -> dict[str, Any]:
    return {entry.name: entry.view(array) for entry in layout}


def _of(arrays: Mapping[str, Mapping[str, Any]], tensor: str) -> dict[str, Any]:
    return {name: by_tensor[tensor] for name, by_tensor in arrays.items() if tensor in by_tensor}


def _in_group(update: Update, fragment: _Fragment) -> Update:
    return update._replace(settings=fragment.settings, lr=update.lr * fragment.group.lr)


def _fragment(
    entry: Entry, piece: Piece, settings: config.Optimizer, backend: Backend
) -> _Fragment:
    group = group_of(settings, entry.parameter)
    both = overlap(entry, piece)
    low, high = both.start - entry.start, both.stop - entry.start
    return _Fragment(
        entry,
        both.start - piece.start,
        both.stop - piece.start,
        (low, high),
        [
            block._replace(
                rows=backend.from_host(block.rows), columns=backend.from_host(block.columns)
            )
            for block in blocks(entry.parameter, low, high)
        ],
        group,
        settings.model_copy(update={"weight_decay": group.weight_decay}),
    )

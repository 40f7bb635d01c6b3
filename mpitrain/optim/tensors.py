"""Tensor-wise updates: sums over whole tensors, results of whole tensors, and updates from both."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain import config
from mpitrain.layers.base import Parameter
from mpitrain.layers.flat import Entry, Storage
from mpitrain.machine.backend import Backend
from mpitrain.optim.rule import (
    Arrays,
    HyperParameters,
    MatrixBlock,
    Shape,
    TensorPiece,
    TensorWise,
    Update,
    group_of,
)
from mpitrain.optim.state import FactSums, laid_out, touched
from mpitrain.regions import Piece, overlap
from mpitrain.transport.base import Request, Transport

Elements = tuple[int, int]
"""Elements [start, stop) of a flattened tensor."""


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
            for rank, elements in peers:
                array = divided.array if elements is None else divided.array[slice(*elements)]
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


class TensorUpdates:
    """Updates of a tensor-wise rule over the pieces of a rank."""

    def __init__(
        self,
        step: TensorWise,
        settings: config.Optimizer,
        storage: Storage,
        pieces: Sequence[Piece],
        state: Mapping[str, Any],
        by_tensor: Mapping[str, Mapping[str, Any]],
        backend: Backend,
        sums: FactSums,
    ):
        """Allocate the vectors of sums and bind their all-reduces; collective.

        state      {name: buffer}
        by_tensor  {name: {tensor: its view}} of the buffers that have `StateLayout.tensors`
        """
        self._step = step
        self._along = {name: buffer for name, buffer in state.items() if name not in by_tensor}
        self._by_tensor = by_tensor
        self._fragments = {
            piece: [_fragment(entry, piece, settings, backend) for entry in touched(storage, piece)]
            for piece in pieces
        }
        everything = touched(storage, Piece(0, storage.length, 0))
        self._sums = [_bound(each.facts, everything, backend, sums) for each in step.rounds]
        self._results = Results(
            {
                fragment.entry.name: (fragment.entry.parameter, fragment.elements)
                for fragments in self._fragments.values()
                for fragment in fragments
                if step.whole and step.whole.of(fragment.entry.parameter)
            },
            storage.dtype,
            backend,
            sums.shards if step.whole else None,
        )

    def sum_facts(self, arrays: Arrays, update: Update) -> None:
        """Sum the facts of all rounds over all pieces; collective.

        Then compute the results of whole tensors whose elements are on several ranks.
        """
        for each, sums in zip(self._step.rounds, self._sums, strict=True):
            sums.vector.fill(0)
            for piece, fragments in self._fragments.items():
                parameters, gradients, _ = arrays[piece]
                for fragment in fragments:
                    each.add(
                        self._piece(piece, fragment, parameters, gradients, None),
                        _in_group(update, fragment),
                    )
            for view in sums.uncounted:
                view.fill(0)
            sums.run()
        self._run_divided(arrays, update)

    def _run_divided(self, arrays: Arrays, update: Update) -> None:
        whole, divided = self._step.whole, self._results.tensors
        if whole is None or not divided:
            return
        for piece, fragments in self._fragments.items():
            parameters, gradients, _ = arrays[piece]
            for fragment in fragments:
                if fragment.entry.name in divided:
                    tensor_piece = self._piece(piece, fragment, parameters, gradients, None)
                    operand = divided[fragment.entry.name].elements
                    whole.operand(tensor_piece, _in_group(update, fragment), operand)
        self._results.run(lambda operand: whole.compute(operand, update))

    def _with_result(self, piece: TensorPiece, name: str, update: Update) -> TensorPiece:
        whole = self._step.whole
        if whole is None or not whole.of(piece.tensor):
            return piece
        if name in self._results.tensors:
            return piece._replace(result=self._results.tensors[name].elements)
        result = update.arena.take(piece.gradients.shape, piece.gradients.dtype)
        whole.operand(piece, update, result)
        whole.compute(result.reshape(piece.tensor.local_shape), update)
        return piece._replace(result=result)

    def update(
        self, piece: Piece, parameters: Any, gradients: Any, mirror: Any, update: Update
    ) -> None:
        for fragment in self._fragments[piece]:
            tensor_piece = self._piece(piece, fragment, parameters, gradients, mirror)
            own = _in_group(update, fragment)
            self._step.apply(self._with_result(tensor_piece, fragment.entry.name, own), own)

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
            {name: buffer[along] for name, buffer in self._along.items()}
            | _of(self._by_tensor, entry.name),
            {
                name: array
                for sums in self._sums
                for name, array in _of(sums.views, entry.name).items()
            },
            blocks,
        )


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

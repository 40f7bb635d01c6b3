"""A mixture of experts: a router sends each token to k of E MLPs (Shazeer et al. 2017, arXiv:1701.06538).

M tokens, C channels, E experts, k experts of a token, H hidden units of an expert; R rows, at most
k M: the tokens of all experts, sorted by expert.

The two terms of the loss, and the capacity, belong to one sequence at a time. So they do not depend
on the layout: a sequence is never divided, but with layout.cp.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.layers.base import Gradients, Now, Parameter, Weights
from mpitrain.layers.initial import Draw
from mpitrain.machine.arena import Arena
from mpitrain.ops import Ops


class Routing(NamedTuple):
    """Where the tokens of one call go.

    places   (M, k): the row of each choice of a token; -1: dropped
    sources  (k M,): the choice of each row, as a number in the flat places: k m + j. Behind the last
             row stand zeros, so that buffers have one size whatever is dropped
    counts   (E,): rows of each expert
    load     (B, E): choices of the tokens of each sequence, dropped ones included
    """

    places: np.ndarray
    sources: np.ndarray
    counts: np.ndarray
    load: np.ndarray


def routed(chosen: np.ndarray, experts: int, sequences: int, capacity: int) -> Routing:
    """Sort the choices of tokens by expert; tokens of one expert keep their order.

    chosen    (M, k): the experts of each token
    capacity  the most tokens that an expert takes of one sequence, the first ones; 0: all
    """
    flat = chosen.reshape(-1)
    sequence = np.arange(len(flat)) // max(1, len(flat) // max(1, sequences))
    kinds = sequence * experts + flat
    load = np.bincount(kinds, minlength=sequences * experts)
    kept = np.arange(len(flat))
    if capacity:
        order = kinds.argsort(kind="stable")
        first = np.cumsum(load) - load
        kept = np.sort(order[np.arange(len(flat)) - first[kinds[order]] < capacity])
    sources = kept[flat[kept].argsort(kind="stable")]
    places = np.full(len(flat), -1)
    places[sources] = np.arange(len(sources))
    sources = np.pad(sources, (0, len(flat) - len(sources)))
    counts = np.bincount(flat[kept], minlength=experts)
    return Routing(places.reshape(chosen.shape), sources, counts, load.reshape(sequences, experts))


class Stay:
    """The rows of one call stay on this rank, which has all experts.

    counts  rows of each expert of this rank
    """

    def __init__(self, counts: np.ndarray):
        self.counts = counts

    def there(self, rows: Any, arena: Arena, beside: Callable[[], None] = lambda: None) -> Any:
        """Return the rows of this rank's experts, in their order; `beside` computes meanwhile."""
        beside()
        return rows

    def back(self, rows: Any, like: Any, arena: Arena) -> Any:
        """Return the rows of this rank's tokens, from the results of all experts.

        like  the argument of `there`, in whose order and size they are
        """
        return rows


class Trip(Stay):
    """The rows of one call go to the ranks of their experts, and back: an all-to-all of unequal counts.

    Rank r of the group has the r-th run of the experts. Buffers of received rows have more rows than
    arrive, so that few sizes occur; the arena allocates when an expert takes more than ever before.
    """

    def __init__(self, ops: Ops, group: Any, counts: np.ndarray, most: int):
        """Tell the counts; collective.    most: rows of this rank's buffers, k M"""
        self._ops, self._group = ops, group
        self._routes = group.routes(counts.reshape(group.size, -1))
        arrived = self._routes.counts[:, group.rank]
        self.counts = arrived.sum(axis=0)
        experts = np.tile(np.arange(arrived.shape[1]), group.size).repeat(arrived.reshape(-1))
        order = experts.argsort(kind="stable")
        grain = max(1, most // 4)
        rest = -len(order) % grain
        self._by_expert = np.pad(order, (0, rest))
        self._by_rank = np.pad(order.argsort(kind="stable"), (0, rest))

    def there(self, rows: Any, arena: Arena, beside: Callable[[], None] = lambda: None) -> Any:
        routes = self._routes
        arrived = arena.take((len(self._by_expert), rows.shape[1]), rows.dtype)
        with self._group.beside(routes.bind(rows[: routes.sent], arrived[: routes.received])):
            beside()
        return self._ops.embedding(self._by_expert[None], arrived, None, arena)[0][0]

    def back(self, rows: Any, like: Any, arena: Arena) -> Any:
        routes = self._routes
        (sorted_rows,), _ = self._ops.embedding(self._by_rank[None], rows, None, arena)
        home = arena.take(like.shape, like.dtype)
        ends = sorted_rows[: routes.received], home[: routes.sent]
        routes.bind(*ends, is_return=True).run()
        return home


class Loads:
    """The tokens of each expert in the steps since the last `take`, over all layers of a rank.

    tokens   (E,): choices of tokens, dropped ones included
    dropped  choices that no expert took
    """

    def __init__(self, experts: int):
        self.tokens, self.dropped = np.zeros(experts), 0.0

    def add(self, routing: Routing) -> None:
        self.tokens += routing.load.sum(axis=0)
        self.dropped += routing.places.size - routing.counts.sum()


class Experts:
    """A mixture of experts, (B, T, C) -> (B, T, C).

    router.weight  (E, C)
    up.weight      (E, N, C), of all experts; N is H, or 2 H for a gated activation
    down.weight    (E, C, H). Of a group, each rank has a run of the experts
    shared.*       the tensors of an MLP that every token passes, if there is one

    activate  the activation and its backward, of rows (R, N) to (R, H)
    hidden    H
    before    1: a weight is that of a softmax over all experts; 0: over the chosen ones
    capacity  factor of the tokens of a sequence that an expert takes in training, over an equal share;
              0: all
    balance   weight in the loss of E sum of (fraction of choices times mean probability) of the
              experts, for each sequence: 1 if all get as many tokens (Switch Transformer, Fedus et
              al. 2022, equation 4)
    group     the expert-parallel group; None: this rank has all experts
    z         weight in the loss of the mean square of the log sum of exponentials (ST-MoE)
    """

    output_is_free = is_rowwise = True

    def __init__(
        self,
        ops: Ops,
        loads: Loads,
        width: int,
        hidden: int,
        k: int,
        inner: Draw,
        onto_residual: Draw,
        is_gated: bool,
        before: bool = False,
        capacity: float = 0.0,
        balance: float = 0.0,
        z: float = 0.0,
        shared: Any = None,
        group: Any = None,
    ):
        self.ops, self.loads, self.width, self.hidden = ops, loads, width, hidden
        self.experts, self.k, self.before = len(loads.tokens), k, int(before)
        self.capacity, self.balance, self.z, self.shared = capacity, balance, z, shared
        self.draws, self.group = (inner, onto_residual), group
        self.outputs = (1 + is_gated) * hidden
        self.activate, self.activate_backward = (
            (ops.swiglu, ops.swiglu_backward) if is_gated else (ops.gelu, ops.gelu_backward)
        )

    def parameters(self) -> list[Parameter]:
        inner, onto_residual = self.draws
        E, C = self.experts, self.width
        up = Parameter("up.weight", (E, self.outputs, C), inner, decayed=True)
        down = Parameter("down.weight", (E, C, self.hidden), onto_residual, decayed=True)
        if self.group:
            each, rank = E // self.group.size, self.group.rank
            up, down = (
                p._replace(
                    slices=(
                        (
                            slice(rank * each, (rank + 1) * each),
                            *(slice(0, n) for n in p.shape[1:]),
                        ),
                    ),
                    holders="ep",
                )
                for p in (up, down)
            )
        own = [Parameter("router.weight", (E, C), inner, decayed=True), up, down]
        shared = self.shared.parameters() if self.shared else []
        return [*own, *(p._replace(name=f"shared.{p.name}") for p in shared)]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        ops, rows = self.ops, x.reshape(-1, self.width)
        logits, routing_state = ops.linear(rows, w["router"]["weight"], None, arena)
        weights, chosen, choice = ops.choose(logits, self.k, self.before, arena)
        sequences = len(x) if x.ndim > 2 else 1
        share = len(rows) // max(1, sequences) * self.k / self.experts
        # Without training the output of a token depends on no other row, so that a cache can be used.
        limits = self.capacity and now.trains
        capacity = max(1, int(self.capacity * share)) if limits else 0
        routing = routed(chosen, self.experts, sequences, capacity)
        taken, _ = ops.embedding((routing.sources // self.k)[None], rows, None, arena)
        shared_out = shared_states = None

        def shared() -> None:
            nonlocal shared_out, shared_states
            if self.shared:
                shared_out, shared_states = self.shared.forward(w["shared"], rows, now, arena)

        trip = Stay(routing.counts)
        if self.group:
            trip = Trip(ops, self.group, routing.counts, len(taken[0]))
        out, states = self._mlps(w, trip.there(taken[0], arena, shared), trip.counts, arena)
        y, combined = ops.combine(trip.back(out, taken[0], arena), routing.places, weights, arena)
        if self.shared:
            ops.add(y, shared_out, y, arena)
        saved = routing_state, choice, routing, trip, states, combined, shared_states, now.weight
        return y.reshape(x.shape), saved

    def _mlps(self, w: Weights, rows: Any, counts: np.ndarray, arena: Arena) -> tuple[Any, Any]:
        """Return the outputs of all experts for their rows, and the states for `_mlps_backward`."""
        z = arena.take((len(rows), self.outputs), rows.dtype)
        z[counts.sum() :] = 0
        up = self._products(w["up"]["weight"], rows, counts, z, arena)
        h, activated = self.activate(z, arena)
        out = arena.take(rows.shape, rows.dtype)
        down = self._products(w["down"]["weight"], h, counts, out, arena)
        return out, (up, activated, down)

    def _products(
        self, weight: Any, rows: Any, counts: np.ndarray, out: Any, arena: Arena
    ) -> list[Any]:
        """Multiply the rows of each expert by its matrix; return the states of the products.

        weight  (E, outputs, inputs);    rows: (R, inputs);    out: (R, outputs)
        """
        return [
            self.ops.linear(rows[part], matrix, None, arena, out[part])[1]
            for matrix, part in zip(weight, parts(counts), strict=True)
        ]

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        ops = self.ops
        routing_state, choice, routing, trip, states, combined, shared_states, weight = saved
        up, activated, down = states
        del saved, states
        rows, k = dy.reshape(-1, self.width), self.k
        self.loads.add(routing)
        own_dout, dweights = ops.combine_backward(rows, combined, routing.sources, arena)
        counts, dshared, shared_pending = trip.counts, None, None

        def shared_backward() -> None:
            nonlocal dshared, shared_pending
            if self.shared:
                dshared, shared_pending = self.shared.backward_input(
                    w["shared"], rows, shared_states, arena
                )

        dout = trip.there(own_dout, arena, shared_backward)
        dh = arena.take((len(dout), self.hidden), dout.dtype)
        dh[counts.sum() :] = 0
        down = self._products_backward(w["down"]["weight"], dout, counts, down, dh, arena)
        dz = self.activate_backward(dh, activated, arena)
        dtaken = arena.take(dout.shape, dout.dtype)
        up = self._products_backward(w["up"]["weight"], dz, counts, up, dtaken, arena)
        dx, _ = ops.combine(trip.back(dtaken, own_dout, arena), routing.places, None, arena)
        share = len(rows) // max(1, len(routing.load)) * k / self.experts
        pulls = (self.balance * weight / max(1.0, share) * routing.load).astype(dout.dtype)
        z = np.broadcast_to(self.z * weight, (len(pulls), 1)).astype(dout.dtype)
        dlogits = ops.choose_backward(dweights, choice, pulls, z, self.before, arena)
        router = w["router"]["weight"]
        of_router, router = ops.linear_backward_input(dlogits, router, routing_state, arena)
        ops.add(dx, of_router, dx, arena)
        if self.shared:
            ops.add(dx, dshared, dx, arena)
        return dx.reshape(dy.shape), (router, up, down, shared_pending)

    def _products_backward(
        self, weight: Any, pulls: Any, counts: np.ndarray, states: list[Any], out: Any, arena: Arena
    ) -> list[Any]:
        return [
            self.ops.linear_backward_input(pulls[part], matrix, state, arena, out[part])[1]
            for matrix, part, state in zip(weight, parts(counts), states, strict=True)
        ]

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        router, up, down, shared = pending
        if "weight" in dw.get("router", {}):
            leaf = dw["router"]["weight"]
            self.ops.linear_backward_weight(router, leaf.array, leaf.claim(), arena)
        for name, products in (("up", up), ("down", down)):
            if "weight" in dw.get(name, {}):
                leaf = dw[name]["weight"]
                adds = leaf.claim()
                for matrix, product in zip(leaf.array, products, strict=True):
                    self.ops.linear_backward_weight(product, matrix, adds, arena)
        if self.shared:
            self.shared.backward_weight(shared, dw.get("shared", {}), arena)


def parts(counts: np.ndarray) -> list[slice]:
    """Return the rows of each expert."""
    stops = np.cumsum(counts)
    return [slice(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]

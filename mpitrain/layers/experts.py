"""A mixture of experts: a router sends each token to k of E MLPs (Shazeer et al. 2017, arXiv:1701.06538).

M tokens, C channels, E experts, k experts of a token, H hidden units of an expert; R rows, at most
k M: the tokens of all experts, sorted by expert.

The two terms of the loss, and the capacity, belong to one sequence at a time. So they do not depend
on the layout: only layout.cp divides a sequence, and then its ranks tell each other their choices.

On one rank no number of rows leaves the device: buffers have the rows of all choices, and `ends` says
where those of each expert end. With layout.ep the host needs the numbers, since messages have sizes.
"""

from __future__ import annotations  # help() then prints signatures as they are written here

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.layers.base import Draw, Gradients, Now, Parameter, Weights, flat_rows
from mpitrain.machine.backend import Arena, Backend, has_memory


class Trip:
    """The rows of one call, which go to the ranks of their experts and back: an all-to-all of unequal counts.

    Rank r of layers.ep has the r-th run of the experts; without that group the rows stay here. Buffers of
    received rows have more rows than arrive, so that few sizes occur; the arena allocates when an expert
    takes more than ever before. The host reads the ends from the device, since messages have sizes: once
    for each forward.

    ends  (E,): the ends of the rows of each expert of this rank
    """

    def __init__(self, layers: Any, ends: Any, most: int, arena: Arena):
        """Tell the counts; collective.    ends: of all experts; most: rows of this rank's buffers, k M"""
        self._ops, self._group, self.ends = layers.ops, layers.ep, ends
        if not (group := layers.ep):
            return
        there, count = layers.backend, len(ends)
        # Where a step is only counted, all experts get as many tokens.
        own = there.to_host(ends) if has_memory(ends) else np.arange(1, count + 1) * most // count
        self._routes = group.routes(np.diff(own, prepend=0).reshape(group.size, -1))
        arrived = self._routes.counts[:, group.rank]
        self.ends = there.from_host(arrived.sum(axis=0).cumsum(), arena)
        experts = np.tile(np.arange(arrived.shape[1]), group.size).repeat(arrived.reshape(-1))
        order = experts.argsort(kind="stable")
        grain = max(1, most // 4)
        rest = -len(order) % grain
        self._by_expert, self._by_rank = (
            there.from_host(np.pad(each, (0, rest)), arena)
            for each in (order, order.argsort(kind="stable"))
        )

    def there(self, rows: Any, arena: Arena, beside: Callable[[], Any]) -> tuple[Any, Any]:
        """Return the rows of this rank's experts, in their order, and what `beside` computes meanwhile."""
        if not self._group:
            return rows, beside()
        routes = self._routes
        arrived = arena.take((len(self._by_expert), rows.shape[1]), rows.dtype)
        with self._group.beside(routes.bind(rows[: routes.sent], arrived[: routes.received])):
            found = beside()
        return self._ops.dispatch(arrived, self._by_expert, 1, arena), found

    def back(self, rows: Any, like: Any, arena: Arena) -> Any:
        """Return the rows of this rank's tokens, from the results of all experts.

        like  the argument of `there`, in whose order and size they are
        """
        if not self._group:
            return rows
        routes = self._routes
        sorted_rows = self._ops.dispatch(rows, self._by_rank, 1, arena)
        home = arena.take(like.shape, like.dtype)
        ends = sorted_rows[: routes.received], home[: routes.sent]
        routes.bind(*ends, is_return=True).run()
        return home


class Experts:
    """A mixture of experts, (B, T, C) -> (B, T, C).

    router.weight  (E, C)
    up.weight      (E, N, C), of all experts; N is H, or 2 H for a gated activation
    down.weight    (E, C, H). Of an expert-parallel group, each rank has a run of the experts, and of
                   a tensor-parallel one a run of the hidden units of each
    shared.*       the tensors of an MLP that every token passes, if there is one

    The loss has two more terms for each sequence. The first is `balance` times E sum of (fraction of
    choices times mean probability) of the experts: 1 if all get as many tokens (Switch Transformer,
    Fedus et al. 2022, equation 4). The second is `z` times the mean square of the log of the sum of
    exponentials (ST-MoE, Zoph et al. 2022).

    layers  the factory, a `Plain`: ops, keys, rows, tokens, ep, and the tally of all mixtures
    hidden  H
    draws   of router and up, and of down
    shared  the MLP, or None
    """

    output_is_free = is_rowwise = True

    def __init__(
        self,
        layers: Any,
        width: int,
        hidden: int,
        draws: tuple[Draw, Draw],
        is_gated: bool,
        shared: Any = None,
    ):
        ops = layers.ops
        self.layers, self.ops, self.keys, self.rows = layers, ops, layers.keys, layers.rows
        self.width, self.draws, self.shared = width, draws, shared
        own, outputs = self.rows.run(hidden, "hidden units"), (1 + is_gated) * hidden
        self.shape, self.hidden = (outputs, hidden), own
        self.activate, self.activate_backward = (
            (ops.swiglu, ops.swiglu_backward) if is_gated else (ops.gelu, ops.gelu_backward)
        )

    def parameters(self) -> list[Parameter]:
        inner, onto_residual = self.draws
        (outputs, hidden), C, E, group = self.shape, self.width, self.keys.experts, self.layers.ep
        router = Parameter("router.weight", (E, C), inner, decayed=True)
        router = router._replace(holders=self.rows.holders, partial=self.rows.partial)
        up = Parameter("up.weight", (E, outputs, C), inner, decayed=True)
        down = Parameter("down.weight", (E, C, hidden), onto_residual, decayed=True)
        if group or self.rows.ranks > 1:
            rank, ranks = (group.rank, group.size) if group else (0, 1)
            experts, every = slice(rank * E // ranks, (rank + 1) * E // ranks), slice(0, C)
            own = slice(self.hidden.start, self.hidden.stop)
            units = [
                slice(first + own.start, first + own.stop) for first in range(0, outputs, hidden)
            ]
            held = "ep" if group else ""
            up = up._replace(slices=tuple((experts, run, every) for run in units), holders=held)
            down = down._replace(slices=((experts, every, own),), holders=held)
        shared = self.shared.parameters() if self.shared else []
        return [router, up, down, *(p._replace(name=f"shared.{p.name}") for p in shared)]

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def forward(self, w: Weights, x: Any, now: Now, arena: Arena) -> tuple[Any, Any]:
        ops, own, keys = self.ops, flat_rows(x), self.keys
        # Every rank of layout.tp routes all rows, also if it has some of them between layers.
        logits, score = ops.score(own, w["router"]["weight"], arena)
        logits, rows = (flat_rows(self.rows.whole(each)) for each in (logits, own))
        weights, chosen, choice = ops.choose(logits, keys.top_k, int(self.is_before), arena)
        entered = self.rows.entered(x.shape)
        sequences = entered[0] if len(entered) > 2 else 1
        own_load, load, *limits = self._limits(chosen, sequences, now.trains, arena)
        places, sources, ends = ops.permute(chosen, load, *limits, arena)
        taken = ops.dispatch(rows, sources, keys.top_k, arena)

        def shared() -> tuple[Any, Any]:
            forward = self.shared and self.shared.forward
            return forward(w["shared"], own, now, arena) if forward else (None, None)

        trip = Trip(self.layers, ends, len(taken), arena)
        inputs, (out_of_shared, shared_states) = trip.there(taken, arena, shared)
        z, up = ops.grouped_linear(inputs, w["up"]["weight"], trip.ends, arena)
        h, activated = self.activate(z, arena)
        outputs, down = ops.grouped_linear(h, w["down"]["weight"], trip.ends, arena)
        home = trip.back(outputs, taken, arena)

        def combined(out: Any, *_: Any) -> tuple[Any, Any]:
            return ops.combine(home, places, weights, arena, out)

        y, combine = self.rows.summed(combined, rows.shape, rows.dtype, arena)
        if self.shared:
            ops.add(y, out_of_shared, y, arena)
        routing, mlps = (places, sources, own_load, load, ends), (up, activated, down)
        saved = score, choice, weights, routing, trip, mlps, combine, shared_states, now.weight
        return y.reshape(x.shape), saved

    @property
    def is_before(self) -> bool:
        """Whether a weight is that of a softmax over all experts, not over the chosen ones."""
        return self.keys.router == "before"

    def _limits(
        self, chosen: Any, sequences: int, trains: bool, arena: Arena
    ) -> tuple[Any, Any, int, int, int]:
        """Return the load of this rank's chunks, and what `permute` takes: that of all, its own, the capacity.

        Without training the output of a token depends on no other one, so that a cache can be used.
        """
        keys, tokens = self.keys, self.layers.tokens
        own = [run.start for run in tokens.runs(tokens.chunks)]
        load = self.ops.count_choices(chosen, keys.experts, sequences, len(own), arena)
        length = len(chosen) // max(1, sequences) * tokens.ranks
        every = self.layers.all_tokens(load, arena) if trains else load
        # Where a step is only counted, the numbers of no other rank are known.
        if not trains or not has_memory(every):
            return load, load, 0, len(own) - 1, length
        capacity = max(1, int(keys.capacity * length * keys.top_k / keys.experts))
        return load, every, own[0], own[-1], capacity if keys.capacity else length

    def backward_input(self, w: Weights, dy: Any, saved: Any, arena: Arena) -> tuple[Any, Any]:
        ops, keys = self.ops, self.keys
        score, choice, weights, routing, trip, mlps, combine, shared_states, weight = saved
        (up, activated, down), (places, sources, own_load, load, ends) = mlps, routing
        del saved, mlps
        own, k = flat_rows(dy), keys.top_k
        rows = flat_rows(self.rows.whole(own))
        ops.add_load(own_load, ends, self.layers.tally, arena)
        own_dout = ops.dispatch(rows, sources, k, arena, weights)

        def dots(out: Any, *_: Any) -> tuple[Any, None]:
            return ops.combine_backward(rows, combine, arena, out), None

        # Each tensor-parallel rank has a summand of an expert's output, and so of these.
        dweights, _ = self.rows.summed(dots, weights.shape, weights.dtype, arena)
        dweights = flat_rows(self.rows.whole(dweights))

        def shared_backward() -> tuple[Any, Any]:
            backward = self.shared and self.shared.backward_input
            return backward(w["shared"], own, shared_states, arena) if backward else (None, None)

        dout, (dshared, shared_pending) = trip.there(own_dout, arena, shared_backward)
        dh, down = ops.grouped_linear_backward_input(dout, w["down"]["weight"], down, arena)
        dz = self.activate_backward(dh, activated, arena)
        dtaken, up = ops.grouped_linear_backward_input(dz, w["up"]["weight"], up, arena)
        home = trip.back(dtaken, own_dout, arena)

        def combined(out: Any, *_: Any) -> tuple[Any, Any]:
            return ops.combine(home, places, None, arena, out)

        dx, _ = self.rows.summed(combined, rows.shape, rows.dtype, arena)
        length = len(rows) // max(1, len(load)) * self.layers.tokens.ranks
        share = max(1.0, length * k / keys.experts)
        dlogits = arena.take((len(rows), keys.experts), rows.dtype)
        ops.choose_backward(
            *(dweights, choice, load, weight, keys.balance / share, keys.z),
            *(int(self.is_before), dlogits, arena),
        )
        dlogits = self.rows.own(dlogits)
        of_router, router = ops.linear_backward_input(dlogits, w["router"]["weight"], score, arena)
        ops.add(dx, of_router, dx, arena)
        if self.shared:
            ops.add(dx, dshared, dx, arena)
        return dx.reshape(dy.shape), (router, up, down, shared_pending)

    def backward_weight(self, pending: Any, dw: Gradients, arena: Arena) -> None:
        router, up, down, shared = pending
        for name, product, of_weight in (
            ("router", router, self.ops.linear_backward_weight),
            ("up", up, self.ops.grouped_linear_backward_weight),
            ("down", down, self.ops.grouped_linear_backward_weight),
        ):
            if "weight" in dw.get(name, {}):
                leaf = dw[name]["weight"]
                of_weight(product, leaf.array, leaf.claim(), arena)
        if self.shared:
            self.shared.backward_weight(shared, dw.get("shared", {}), arena)


class TokensOfExperts:
    """The tokens of each expert in a step, over all layers and ranks."""

    def __init__(
        self, tally: Any, backend: Backend, bind: Callable[[np.ndarray], Any], copies: int
    ):
        """Bind their sum; collective.

        tally   (2, E) int64 on the device: the choices of this rank's tokens, and those that experts took
        bind    (array) -> its sum over all ranks, as `Group.bind`
        copies  ranks that route the same tokens, those of layout.tp
        """
        self._tally, self._backend, self._copies = tally, backend, copies
        self._counts = np.zeros(tally.shape)
        self._sum = bind(self._counts)

    def extras(self) -> dict[str, Any]:
        """Return the extras of the step's `StepResult`, and set the tally to zero; collective."""
        self._counts[...] = self._backend.to_host(self._tally)
        self._tally.fill(0)
        self._sum.run()
        tokens, taken = self._counts / self._copies
        return {
            "expert_tokens": [int(count) for count in tokens],
            "dropped": (tokens.sum() - taken.sum()) / max(1.0, tokens.sum()),
            "imbalance": tokens.max() / max(1.0, tokens.mean()),
        }

"""What the replica of every mode must do: its parameters, gradients, steps and rows.

A law takes the trainer of one rank, and is called on all ranks. Numbers are whole, so that sums are exact in float32.
"""

import numpy as np

from mpitrain.pipeline.schedules import STREAMS

MICRO_BATCHES = 2


def coded(trainer, seed=0):
    """Whole numbers below 97, coded by position in the flat buffer: bfloat16 has all of them."""
    return (7.0 * np.arange(trainer.storage.length) + 13 * seed) % 97


def assert_shows(trainer, flat):
    """Every unit that this rank opens has the numbers of a whole flat buffer."""
    if trainer.grid.is_server:
        return
    tensors = trainer.tensors()
    for entry in trainer.storage.entries:
        assert np.allclose(tensors[entry.name], entry.view(flat), rtol=1e-6, atol=0), entry.name


def leaves_of(tree):
    for node in tree.values():
        yield from leaves_of(node) if isinstance(node, dict) else [node]


def gathered(trainer, thing):
    return trainer.transport.gather_text(thing)


def receives_alone(trainer):
    """Whether this rank, an asynchronous server, receives each gradient by itself."""
    return trainer.grid.is_server and trainer.config.replication.update != "sync"


class ParameterLaws:
    """Of the parameters of any replica."""

    def law_units_open_with_the_initial_values_of_their_names(self, trainer):
        whole = np.zeros(trainer.storage.length, trainer.storage.dtype)
        trainer.storage.initialize(whole, trainer.config.run.seed, trainer.backend)
        trainer.replica.sync()
        if trainer.replica.device.mirror:
            trainer.replica.device.mirror(whole, whole, trainer.arena)
        assert_shows(trainer, whole)

    def law_an_update_shows_on_every_rank_after_a_sync(self, trainer):
        replica, flat, pieces = trainer.replica, coded(trainer), []

        def write(scale, lr, step, delayed, updated=lambda piece: None):
            """As `Optimizer.update`, whose calls are bound to these arrays."""
            assert [*replica.optimizer.bound] == [*replica.owned]
            for piece, calls in replica.optimizer.bound.items():
                pieces.append(piece)
                views = [replica.owned[piece], replica.mirrors.get(piece)]
                for _, (parameters, *_), _, named in calls:
                    for view, bound in zip(views, (parameters, named.get("mirror")), strict=True):
                        assert (view is None) == (bound is None)
                        assert view is None or np.shares_memory(view, bound), piece
                for view in views:
                    if view is not None:
                        view[...] = flat[piece.start : piece.stop]
                updated(piece)

        replica.sync()
        replica.optimizer.update = write
        replica.apply(1.0, 0.0, 1)
        replica.sync()
        updated = gathered(trainer, sum(piece.stop - piece.start for piece in pieces))
        if trainer.grid.axes.servers == 0:
            assert sum(updated) >= trainer.storage.length
            assert_shows(trainer, flat)
        elif trainer.grid.is_server:
            for start, stop, place in pieces:
                assert np.array_equal(
                    replica.parameters[place : place + stop - start], flat[start:stop]
                )

    def law_every_element_is_in_the_state_of_a_rank(self, trainer):
        trainer.replica.sync()
        buffer, *_ = trainer.replica.parameter_state()
        assert buffer.name == "parameters"
        assert sum(stop - start for start, stop, _ in buffer.pieces) == buffer.array.size
        found = np.zeros(trainer.storage.length, int)
        for pieces in gathered(trainer, buffer.pieces):
            for start, stop, _ in pieces:
                found[start:stop] += 1
        pp = trainer.grid.axes.pp  # each stage has a flat buffer of its own
        assert pp > 1 or found.min() > 0

    def law_what_is_loaded_into_the_state_shows(self, trainer):
        trainer.replica.sync()
        if not trainer.grid.is_server:
            trainer.tensors()  # units that were gathered are gathered again
        flat = coded(trainer, 1)
        buffer, *_ = trainer.replica.parameter_state()
        for start, stop, place in buffer.pieces:
            buffer.array[place : place + stop - start] = flat[start:stop]
        trainer.replica.loaded()
        trainer.replica.sync()
        assert_shows(trainer, flat)

    def law_all_of_its_memory_is_listed(self, trainer):
        replica = trainer.replica
        arrays = replica.parameter_arrays
        assert any(replica.parameters is array for array in arrays)
        assert replica.mirror is None or any(replica.mirror is array for array in arrays)


class GradientLaws:
    """Of the gradients of any replica. Each rank's gradient is coded by rank, micro-batch and position."""

    def gradient(self, trainer, rank, micro):
        return (1 + rank) * (1 + micro) * (coded(trainer, rank) % 11)

    def step(self, trainer, step, silent=()):
        """Fill the gradients of all micro-batches, and reduce; return this rank's gradient.

        silent: full names of the tensors that no layer writes.
        """
        replica, storage = trainer.replica, trainer.storage
        replica.begin(step)
        if trainer.config.pipeline.schedule in STREAMS:
            replica.turn()  # begins the gradient of a micro-batch
        own = np.zeros(storage.length)
        rank = trainer.transport.rank
        for micro in range(MICRO_BATCHES) if not trainer.grid.is_server else ():
            values = self.gradient(trainer, rank, micro)
            written = set()
            for unit in reversed(range(len(storage.units))):
                tree = replica.gradients(unit)
                for parameter in storage.units[unit].layer.parameters():
                    name = storage.units[unit].full_name(parameter)
                    if name in silent or name in written:
                        continue
                    written.add(name)
                    entry = next(entry for entry in storage.entries if entry.name == name)
                    leaf = tree
                    for key in parameter.name.split("."):
                        leaf = leaf[key]
                    if leaf.claim():
                        leaf.array[...] += entry.view(values)
                    else:
                        leaf.array[...] = entry.view(values)
                    entry.view(own)[...] += entry.view(values)
                replica.ready(unit, micro == MICRO_BATCHES - 1)
                replica.poll()
        replica.wait()
        return own

    def sums(self, trainer, own):
        """The sums over the members, from every rank's own gradient."""
        everyone = gathered(trainer, own.tolist())
        workers = trainer.grid.axes.ranks - trainer.grid.axes.servers
        members = range(workers) if trainer.grid.is_server else trainer.replica.members
        return sum(np.array(everyone[rank]) for rank in members)

    def law_the_pieces_that_a_rank_updates_have_the_sums_over_its_members(self, trainer):
        total = self.sums(trainer, self.step(trainer, 0))
        assert total.any()
        summed = {} if receives_alone(trainer) else trainer.replica.summed
        for piece, found in summed.items():
            assert np.array_equal(found, total[piece.start : piece.stop]), piece

    def law_a_second_step_overwrites_and_a_tensor_that_no_layer_writes_is_zero(self, trainer):
        self.step(trainer, 0)
        silent = {trainer.storage.entries[-1].name}
        total = self.sums(trainer, self.step(trainer, 1, silent))
        assert not trainer.storage.entries[-1].view(total).any()
        summed = {} if receives_alone(trainer) else trainer.replica.summed
        for piece, found in summed.items():
            assert np.array_equal(found, total[piece.start : piece.stop]), piece

    def law_each_element_is_squared_once_for_each_sum(self, trainer):
        total = self.sums(trainer, self.step(trainer, 0))
        squared = trainer.replica.squared
        own = sum(float((view.astype(float) ** 2).sum()) for view in squared)
        everyone, wanted = gathered(trainer, own), float((total**2).sum())
        if receives_alone(trainer):
            return
        members = trainer.replica.members
        found = sum(everyone[rank] for rank in members)
        # Servers square the gradients of a synchronous worker; each stage of an asynchronous
        # pipeline squares its own.
        assert found in (wanted, 0.0 if len(members) == 1 else len(members) * wanted)

    def law_it_lists_its_memory_and_keeps_no_state_without_a_wire_format(self, trainer):
        replica = trainer.replica
        assert any(replica.gradient_buffer is array for array in replica.gradient_arrays)
        assert replica.buckets.state() == [] and not replica.buckets.delayed


class StepLaws:
    """Of steps of a trainer, whose source of batches is `source`."""

    def step(self, trainer, source, index):
        """The result of a step, in any mode."""
        own, replica = None, trainer.replica
        for number in replica.steps(index, lambda: False):
            own = trainer.step(number, *replica.batch(source, number))
        return replica.outcome(index, own)._replace(comm_s=0.0, extras={})

    def law_all_ranks_have_the_same_result(self, trainer, source):
        for index in range(2):
            found = gathered(trainer, self.step(trainer, source, index))
            assert all(result == found[0] for result in found) and found[0][4]

    def law_a_gradient_that_is_not_finite_updates_no_rank_and_is_counted(self, trainer, source):
        replica = trainer.replica
        loss = replica.loss

        def spoilt(logits, targets, scale):
            value, gradient = loss(logits, targets, scale)
            gradient[...] = np.inf
            return value, gradient

        trainer.sync_parameters()
        before = trainer.parameters.copy()
        replica.loss = spoilt
        with np.errstate(all="ignore"):
            result = self.step(trainer, source, 0)
        trainer.sync_parameters()
        assert not result.updated
        # The average of equal parameters is rounded.
        assert np.allclose(before, trainer.parameters, rtol=1e-6, atol=0)
        assert replica.skips.scalars()["skipped_updates"] in (
            1 if trainer.config.pipeline.schedule == "1f1b" else 0,
            trainer.grid.axes.dp if trainer.config.replication.update == "async" else 1,
        )

    def law_its_state_is_that_of_the_optimizer_for_the_pieces_of_this_rank(self, trainer, source):
        self.step(trainer, source, 0)
        trainer.sync_parameters()
        own = sum(p.stop - p.start for p in trainer.replica.summed)
        found = trainer.replica.optimizer_state()
        assert {buffer.array.size for buffer in found} == ({own} if own else set())

    def law_four_numbers_are_summed_over_all_ranks(self, trainer, source):
        rank, n = trainer.transport.rank, trainer.transport.size
        total = trainer.replica.total(rank, 1, rank * rank, 0)
        assert total == [n * (n - 1) / 2, n, sum(r * r for r in range(n)), 0]


class RowsLaws:
    """Of the rows of all ranks."""

    def law_every_row_of_a_batch_belongs_to_one_replica(self, trainer, source):
        rows = gathered(trainer, [*trainer.share()])
        of_stage = rows[:: trainer.grid.axes.tp] if trainer.grid.axes.pp == 1 else rows[:1]
        assert trainer.grid.axes.pp > 1 or sorted(row for mine in of_stage for row in mine) == [
            *range(12)
        ]

    def law_batches_are_those_rows_of_the_global_batch(self, trainer, source):
        size = trainer.config.batch.size
        inputs, targets = trainer.replica.batch(source, 3, None)
        mine = trainer.share()
        wanted = source.batch(trainer.config.run.seed, 3, size, mine)
        assert np.array_equal(inputs, wanted[0]) and np.array_equal(targets, wanted[1])

    def law_the_gradient_of_the_loss_is_scaled_and_the_loss_is_not(self, trainer, source):
        if trainer.grid.is_server or trainer.config.replication.mode == "master":
            return  # no logits on a server; those of all ranks on a master
        rows, results, batch = trainer.replica, [], trainer.config.batch
        count = -(-len(rows.own_rows) // batch.micro_batches)  # of the first micro-batch
        trainer.replica.begin(0)
        for scale in (1.0, 0.25):
            logits = np.linspace(0, 1, 3 * count, dtype=np.float32).reshape(count, 3)
            results.append(rows.loss(logits, np.arange(count) % 3, scale))
        (one, whole), (other, quarter) = results
        assert float(one) == float(other) and np.allclose(whole / 4, quarter, rtol=1e-6, atol=0)

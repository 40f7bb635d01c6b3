"""A set of layers whose ranks each hold a part: as simple as can be, to show what stands below such sets.

Every reduction is bound anew. B batch, T tokens, C channels, V vocabulary.
"""

from mpitrain.layers.compose import Residual
from mpitrain.layers.initial import normal
from mpitrain.layers.plain import Attention, Embedding, Linear, Lookups, Norm
from mpitrain.ops import bodies
from mpitrain.parallel.grid import share

host = bodies.host()


def summed(group, array):
    group.all_reduce(array.reshape(-1))
    return array


class Table(Embedding):
    """Some rows of the tokens' table, a ragged part; the positions whole."""

    def __init__(self, group, vocab, context, width):
        super().__init__(host, vocab, context, width, normal(0.02))
        self.group, self.rows = group, share(vocab, group.rank, group.size)

    def parameters(self):
        tokens, positions = super().parameters()
        rows = (slice(self.rows.start, self.rows.stop), slice(0, self.width))
        return [tokens._replace(slices=(rows,)), positions._replace(holders="tp")]

    def forward(self, w, x, arena):
        y, saved = host.embedding(
            x, w["tokens"], None if self.group.rank else w["positions"], arena, self.rows.start
        )
        return summed(self.group, y), Lookups(saved, {})


class WholeNorm(Norm):
    """On every rank, from equal rows: its gradients are whole."""

    def parameters(self):
        return [p._replace(holders="tp") for p in super().parameters()]


class Column(Linear):
    """Some outputs, as runs of the weight's rows; every rank has the whole input, and its gradient is a sum."""

    def __init__(self, group, runs, inputs, outputs, draw, activation=None, bias=True):
        super().__init__(host, inputs, sum(map(len, runs)), draw, activation, bias)
        self.group, self.runs, self.whole = group, runs, outputs

    def parameters(self):
        cuts = [slice(run.start, run.stop) for run in self.runs]
        found = [p._replace(shape=(self.whole, *p.shape[1:])) for p in super().parameters()]
        return [
            p._replace(slices=tuple((cut, *(slice(0, n) for n in p.shape[1:])) for cut in cuts))
            for p in found
        ]

    def backward_input(self, w, dy, saved, arena):
        dx, pending = super().backward_input(w, dy, saved, arena)
        return summed(self.group, dx), pending


class Row(Linear):
    """Some inputs: outputs are a sum. Each rank sums the bias' gradient over its share of the rows alone."""

    output_is_free = True

    def __init__(self, group, run, inputs, outputs, draw):
        super().__init__(host, len(run), outputs, draw, bias=False)
        self.group, self.run, self.whole = group, run, inputs

    def parameters(self):
        (weight,) = super().parameters()
        rows = (slice(0, self.outputs), slice(self.run.start, self.run.stop))
        bias = Linear(host, 1, self.outputs, self.draw).parameters()[1]
        return [
            weight._replace(shape=(self.outputs, self.whole), slices=(rows,)),
            bias._replace(holders="tp", partial=True),
        ]

    def forward(self, w, x, arena):
        y, saved = super().forward({"weight": w["weight"]}, x, arena)
        summed(self.group, y)
        y += w["bias"]
        return y, saved

    def backward_weight(self, pending, dw, arena):
        super().backward_weight(pending, dw, arena)
        dy = pending[0]
        mine, bias = share(len(dy), self.group.rank, self.group.size), dw["bias"]
        part = dy[mine.start : mine.stop].sum(0)
        bias.array[...] = bias.array + part if bias.claim() else part


class SplitLoss:
    """Cross-entropy of logits of which every rank has some columns."""

    def __init__(self, group, first):
        self.group, self.first = group, first

    def _maxima(self, logits, arena):
        maxima = host.row_maximum(logits, arena)
        self.group.all_reduce(maxima, "maximum")
        return maxima

    def gradient(self, logits, targets, scale, arena):
        maxima = self._maxima(logits, arena)
        facts = summed(
            self.group, host.row_exponentials(logits, targets, self.first, maxima, arena)
        )
        return host.cross_entropy_split(logits, targets, self.first, maxima, facts, scale, arena)

    def value(self, logits, targets, arena):
        return self.gradient(logits.copy(), targets, 1.0, arena)[0]

    def correct(self, logits, targets, arena):
        places = host.row_argmax(logits, self.first, self._maxima(logits, arena), arena)
        self.group.all_reduce(places, "maximum")
        return host.count_correct_split(places, targets, arena)


class Sharded:
    """The constructors of `Plain`, of ranks that each hold a part; heads and columns are divided raggedly."""

    def __init__(self, group):
        self.group = group

    def _mine(self, count):
        return share(count, self.group.rank, self.group.size)

    def embedding(self, vocab, context, width):
        self.first = self._mine(vocab).start
        return Table(self.group, vocab, context, width)

    def norm(self, width, epsilon=1e-5):
        return WholeNorm(host, width, epsilon)

    def dropped(self, layer, rate, columns=0):
        assert not rate
        return layer

    def residual(self, inner):
        return Residual(inner)

    def _columns(self, width, heads):
        """The channels of this rank's heads."""
        mine, each = self._mine(heads), width // heads
        self.heads = len(mine)
        return range(mine.start * each, mine.stop * each)

    def qkv(self, width, heads, draw):
        mine = self._columns(width, heads)
        runs = [range(start + mine.start, start + mine.stop) for start in (0, width, 2 * width)]
        return Column(self.group, runs, width, 3 * width, draw)

    def attention(self, width, heads, dropout=0.0):
        assert not dropout
        self.inputs = self._columns(width, heads)  # of the row linear that comes next
        return Attention(host, self.heads)

    def column_linear(self, inputs, outputs, draw, activation=None):
        self.inputs = self._mine(outputs)
        return Column(self.group, [self.inputs], inputs, outputs, draw, activation)

    def row_linear(self, inputs, outputs, draw):
        return Row(self.group, self.inputs, inputs, outputs, draw)

    def head(self, width, vocab, draw):
        return Column(self.group, [self._mine(vocab)], width, vocab, draw, bias=False)

    def loss(self):
        return SplitLoss(self.group, self.first)

"""What every layer must do, over any body of the operations: who may write where, and that gradients are those of y.

A law takes the constructors of the layers and the backend whose arrays they compute with.
"""

from copy import copy
from typing import Any

import numpy as np

from mpitrain.layers.base import Now, Unit, backward, fusion_of
from mpitrain.layers.dropout import Dropout, Dropped
from mpitrain.layers.plain import GeluErf, Plain, Rotary, RowGate, Sequential, Tanh
from mpitrain.layers.recomputed import Recomputed
from mpitrain.machine.backend import Backend
from mpitrain.models.gpt import gpt
from tests.unit.placing import place

GPT = {"vocab": 11, "context": 9, "width": 12, "heads": 3, "depth": 2}
WIDTH = 6
STEP = 1e-5
NOW = Now(1, 0, 2, True)


class Watched:
    """A layer that computes as another does, and finds each write into an array that must stay."""

    def __init__(self, inner: Any, host: Any):
        """host: (array on the device) -> a copy of its numbers."""
        self.inner, self._host = inner, host
        self.output_is_free = inner.output_is_free

    @property
    def fusion(self):
        offer = fusion_of(self.inner)
        if not offer.gelu_cut:
            return offer
        return offer._replace(gelu_cut=Watched(offer.gelu_cut, self._host))

    def parameters(self):
        return self.inner.parameters()

    def forward(self, w, x, now, arena, *fused):
        """The arrays that must stay, (array, its numbers, its name), go beside what the layer saves."""
        seen = [(x, self._host(x), "x"), *((r, self._host(r), "residual") for r in fused)]
        y, saved = self.inner.forward(w, x, now, arena, *fused)
        self._check(seen, "it had gone forward")
        seen += [] if self.output_is_free else [(y, self._host(y), "y")]
        if not fusion_of(self.inner).gelu_cut:
            return y, (saved, seen)
        saved, slope = saved
        return y, ((saved, seen), slope)

    def backward_input(self, w, dy, saved, arena, *fused):
        if fusion_of(self.inner).gelu_cut:
            (saved, seen), slope = saved
            saved = saved, slope
        else:
            saved, seen = saved
        seen += [(dy, self._host(dy), "dy")]
        if not fusion_of(self.inner).takes_gelu:
            seen += [(residual, self._host(residual), "residual") for residual in fused]
        self._check(seen, "the backward half began")
        dx, pending = self.inner.backward_input(w, dy, saved, arena, *fused)
        self._check(seen, "its input half was over")
        return dx, (pending, seen)

    def backward_weight(self, pending, dw, arena):
        pending, seen = pending
        self.inner.backward_weight(pending, dw, arena)
        self._check(seen, "its weight half was over")

    def _check(self, seen, when):
        for array, then, name in seen:
            changed = not np.array_equal(self._host(array), then, equal_nan=True)
            assert not changed, (
                f"somebody wrote into {name} of {type(self.inner).__name__} before {when}"
            )


class Unfused:
    """A layer that computes as another does, and offers no fusion."""

    def __init__(self, inner: Any):
        self.inner, self.output_is_free = inner, inner.output_is_free

    def parameters(self):
        return self.inner.parameters()

    def forward(self, w, x, now, arena):
        return self.inner.forward(w, x, now, arena)

    def backward_input(self, w, dy, saved, arena):
        return self.inner.backward_input(w, dy, saved, arena)

    def backward_weight(self, pending, dw, arena):
        self.inner.backward_weight(pending, dw, arena)


class Wrapping:
    """The constructors of `Plain`, whose layers are wrapped."""

    def __init__(self, plain: Plain, wrap: Any):
        """wrap: (layer) -> layer."""
        self._plain, self._wrap = plain, wrap

    def __getattr__(self, kind):
        return lambda *args, **kwargs: self._wrap(getattr(self._plain, kind)(*args, **kwargs))


def watched_plain(plain: Plain, backend: Backend) -> Wrapping:
    """The constructors of `Plain`, whose layers are watched."""
    return Wrapping(
        plain, lambda layer: Watched(layer, lambda array: backend.to_host(array).copy())
    )


def draw(generator, shape):
    """Parameters of about 1, so that no gradient is lost beside another."""
    return generator.standard_normal(shape)


class Pictured:
    """A layer of images (2, 5, 2, 3), as a layer (2, 5, WIDTH) -> (2, 5, WIDTH)."""

    def __init__(self, inner: Any):
        self.inner, self.output_is_free = inner, inner.output_is_free

    def parameters(self):
        return self.inner.parameters()

    def output_shape(self, shape):
        return shape

    def forward(self, w, x, now, arena):
        y, saved = self.inner.forward(w, x.reshape(*x.shape[:-1], 2, WIDTH // 2), now, arena)
        return y.reshape(x.shape), (saved, y.shape)

    def backward_input(self, w, dy, saved, arena):
        saved, shape = saved
        dx, pending = self.inner.backward_input(w, dy.reshape(shape), saved, arena)
        return dx.reshape(dy.shape), pending

    def backward_weight(self, pending, dw, arena):
        self.inner.backward_weight(pending, dw, arena)


def mixture(factory, is_gated=True, **keys):
    """A mixture of 3 experts, 2 of a token; without terms of the loss, which the laws do not know."""
    keys = {"experts": 3, "balance": 0.0, **keys}
    model = factory.keys.model_copy(update=keys)
    own = copy(factory)
    own.keys, own.tally = model, None
    return own.experts(WIDTH, 5, draw, draw, is_gated)


def kinds(plain) -> dict[str, Any]:
    """One layer of each kind and some made of them, each (..., WIDTH) -> (..., WIDTH)."""

    factory = getattr(plain, "_plain", plain)

    def linear(activation=None):
        return plain.linear(WIDTH, WIDTH, draw, activation)

    def dropout():
        return Dropout(factory, 0.25, 1)

    def attention_with_dropout():
        layer = factory.attention(WIDTH, 2, dropout=0.25)
        layer.drop.number = 1
        return layer

    return {
        "experts": mixture(factory, is_gated=False),
        "gated experts": mixture(
            factory, shared=4, shared_gate=True, router="before", capacity=0.7
        ),
        "linear": linear(),
        "relu": linear("relu"),
        "gelu": linear("gelu"),
        "norm": plain.norm(WIDTH),
        "rms norm": plain.rms_norm(WIDTH),
        "gated": Sequential(up=plain.linear(WIDTH, 2 * WIDTH, draw), gate=plain.swiglu()),
        "gated by gelu": Sequential(up=plain.linear(WIDTH, 2 * WIDTH, draw), gate=plain.geglu()),
        "rotary": Sequential(
            qkv=plain.qkv(WIDTH, 3, draw, 1, bias=False),
            attention=plain.attention(WIDTH, 3, 1, rotary=Rotary(100.0, 9)),
        ),
        "encoder": Sequential(
            sum=plain.residual(Sequential(a=linear(), b=GeluErf(factory.ops), c=linear())),
            norm=plain.norm(WIDTH),
        ),
        "soft-capped": Sequential(a=linear(), b=plain.soft_cap(0.8)),
        "clipped": Sequential(a=linear(), b=plain.clip(0.8)),
        "scaled": Sequential(a=linear(), b=plain.scaled(0.8)),
        "joint norms": Sequential(
            qkv=plain.qkv(WIDTH, 2, draw, bias=False),
            norms=plain.head_norms(WIDTH, 2, joint=True),
            attention=plain.attention(WIDTH, 2),
        ),
        "row gate": RowGate(factory.ops, linear(), factory.linear(WIDTH, 1, draw)),
        "tanh": Sequential(a=linear(), b=Tanh(factory.ops)),
        "attention": Sequential(qkv=plain.qkv(WIDTH, 2, draw), attention=plain.attention(WIDTH, 2)),
        "attention within a window": Sequential(
            qkv=plain.qkv(WIDTH, 2, draw), attention=plain.attention(WIDTH, 2, window=2)
        ),
        "attention to later tokens": Sequential(
            qkv=plain.qkv(WIDTH, 2, draw), attention=plain.attention(WIDTH, 2, causal=False)
        ),
        "to linear": Sequential(a=plain.norm(WIDTH), b=linear("relu"), c=linear()),
        "to relu": Sequential(a=linear(), b=linear("relu")),
        "from gelu": Sequential(
            a=plain.norm(WIDTH), b=linear("gelu"), c=linear("gelu"), d=linear()
        ),
        "to a shortcut": Sequential(a=linear("relu"), b=plain.residual(linear("relu"))),
        "shortcut": plain.residual(linear("gelu")),
        "dropout": dropout(),
        "attention with dropout": Sequential(
            qkv=plain.qkv(WIDTH, 2, draw), attention=attention_with_dropout()
        ),
        "dropped": Sequential(a=linear("gelu"), b=Dropped(linear(), dropout())),
        "dropped norm": Dropped(plain.norm(WIDTH), dropout()),
        "convolution": Pictured(plain.conv(3, 3, 3, draw)),
        # The pooling leaves out the last of 5 rows.
        "pooled": Pictured(
            Sequential(conv=plain.conv(3, 15, 5, draw, "relu"), pool=plain.max_pool(2))
        ),
    }


def blocks(plain) -> dict[str, Any]:
    """What a transformer is made of, each (..., 64) -> (..., 64), with a head of 64 channels: kernels of 16 bits take these."""
    return {
        "attention": Sequential(qkv=plain.qkv(64, 1, draw), attention=plain.attention(64, 1)),
        "mlp": Sequential(a=plain.linear(64, 64, draw, "gelu"), b=plain.linear(64, 64, draw)),
    }


LAWS_OF_BITS = (
    "law_outputs_stay_until_the_weight_half_and_backward_equals_the_halves",
    "law_what_belongs_to_the_caller_is_kept_by_nobody",
    "law_a_recomputed_layer_saves_its_input_alone_and_has_the_same_bits",
)
"""Those that hold in 16 bits, too."""


def placed(layer, backend: Backend, dtype=np.float64):
    """(weights, gradients, {name: weight}, {name: Gradient}) of one layer, in the backend's memory."""
    weights, gradients, arrays, slots = place([Unit("layer", layer)], 1, dtype)
    there = {name: backend.from_host(array) for name, array in arrays.items()}
    sums = np.promote_types(dtype, np.float32)
    for slot in slots.values():
        slot.array = backend.from_host(slot.array.astype(sums))
    replace = {id(array): there[name] for name, array in arrays.items()}
    return _mapped(weights["layer"], replace), gradients["layer"], there, slots


def _mapped(tree, replace):
    return {
        name: _mapped(leaf, replace) if isinstance(leaf, dict) else replace[id(leaf)]
        for name, leaf in tree.items()
    }


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


class LayerLaws:
    """A law is a function of a set of constructors and a backend."""

    def __init__(self, kinds=kinds, width=WIDTH, dtype=np.float64):
        """dtype: in which layers compute; their gradients have 32 bits at least."""
        self.kinds, self._width, self._dtype = kinds, width, dtype

    def _placed(self, layer, backend):
        return placed(layer, backend, self._dtype)

    def _numbers(self, seed):
        return numbers(seed, 2, 5, self._width).astype(self._dtype)

    def law_outputs_stay_until_the_weight_half_and_backward_equals_the_halves(
        self, plain: Plain, backend: Backend
    ):
        watched = watched_plain(plain, backend)
        for name, kind in self.kinds(watched).items():
            for layer in (kind, plain.residual(kind), plain.residual(plain.residual(kind))):
                found = []
                for way in (_both_halves, backward):
                    weights, gradients, _, slots = self._placed(layer, backend)
                    arena = backend.arena()
                    _, saved = layer.forward(
                        weights, backend.from_host(self._numbers(3)), NOW, arena
                    )
                    dy = backend.from_host(self._numbers(4))
                    dx = _noted(lambda: way(layer, weights, dy, saved, gradients, arena), name)  # noqa: B023
                    found.append(
                        [
                            backend.to_host(array).copy()
                            for array in (dx, *(slot.array for slot in slots.values()))
                        ]
                    )
                assert all(map(np.array_equal, *found)), (
                    f"{name}: the halves, and both at once, have other bits"
                )

    def law_a_frozen_tensor_gets_no_gradient_and_all_others_get_theirs(
        self, plain: Plain, backend: Backend
    ):
        """A device sums a bias in another order where the product of its weight does not do so."""
        for name, layer in self.kinds(plain).items():
            names = [f"layer.{parameter.name}" for parameter in layer.parameters()]
            for way in (_both_halves, backward):
                found = {}
                for frozen in (None, *names):
                    weights, gradients, _, slots = self._placed(layer, backend)
                    if frozen:
                        _, *path, last = frozen.split(".")
                        node = gradients
                        for step in path:
                            node = node[step]
                        del node[last]
                    arena, x = backend.arena(), backend.from_host(self._numbers(3))
                    _, saved = layer.forward(weights, x, NOW, arena)
                    dy = backend.from_host(self._numbers(4))
                    dx = way(layer, weights, dy, saved, gradients, arena)
                    assert [not slot.filled for slot in slots.values()] == [
                        one == frozen for one in slots
                    ], (name, frozen)
                    arrays = {one: slot.array for one, slot in slots.items() if one != frozen}
                    found[frozen] = {
                        one: backend.to_host(array).copy()
                        for one, array in {"": dx, **arrays}.items()
                    }
                for frozen, mine in found.items():
                    for one, array in mine.items():
                        error = np.abs(array - found[None][one])
                        assert np.all(error <= 1e-13 * bool(one)), (name, frozen, one)

    def law_a_whole_model_writes_only_into_its_logits(self, plain: Plain, backend: Backend):
        units = gpt(watched_plain(plain, backend), **GPT)
        assert units[-1].layer.output_is_free, "the loss writes its gradient over the logits"
        arena, saved, bound = (
            backend.arena(),
            [],
            [placed(unit.layer, backend, np.float32) for unit in units],
        )
        tokens = np.random.default_rng(0).integers(GPT["vocab"], size=(3, GPT["context"] + 1))
        x = backend.from_host(tokens[:, :-1])
        for unit, (weights, *_) in zip(units, bound, strict=True):
            x, kept = unit.layer.forward(weights, x, NOW, arena)
            saved.append(kept)
        targets = backend.from_host(tokens[:, 1:]).reshape(-1)
        _, dy = plain.ops.cross_entropy(
            x.reshape(len(targets), -1), targets, 1 / len(targets), arena
        )
        dy = dy.reshape(x.shape)
        for unit, (weights, gradients, _, _) in zip(reversed(units), reversed(bound), strict=True):
            dy = _both_halves(unit.layer, weights, dy, saved.pop(), gradients, arena)

    def law_what_belongs_to_the_caller_is_kept_by_nobody(self, plain: Plain, backend: Backend):
        """A free output and every dx are spoilt as soon as they are returned; what comes later must not see it."""
        for name, kind in self.kinds(plain).items():
            for layer in (kind, plain.residual(kind)):
                found = {}
                for spoil in (False, True):
                    weights, gradients, _, slots = self._placed(layer, backend)
                    arena, dy = backend.arena(), backend.from_host(self._numbers(4))
                    y, saved = layer.forward(
                        weights, backend.from_host(self._numbers(3)), NOW, arena
                    )
                    if spoil and layer.output_is_free:
                        y.fill(np.nan)
                    dx, pending = layer.backward_input(weights, dy, saved, arena)
                    first = backend.to_host(dx).copy()
                    if spoil:
                        dx.fill(np.nan)
                    layer.backward_weight(pending, gradients, arena)
                    found[spoil] = [
                        first,
                        *(backend.to_host(slot.array).copy() for slot in slots.values()),
                    ]
                for clean, spoilt in zip(found[False], found[True], strict=True):
                    assert np.array_equal(clean, spoilt), name

    def law_fused_calls_have_the_bits_of_separate_ones(self, plain: Plain, backend: Backend):
        found = []
        for constructors in (plain, Wrapping(plain, Unfused)):
            found.append({})
            for name, kind in self.kinds(constructors).items():
                for depth, layer in enumerate((kind, constructors.residual(kind))):
                    weights, gradients, _, slots = self._placed(layer, backend)
                    arena, x = backend.arena(), backend.from_host(self._numbers(3))
                    y, saved = layer.forward(weights, x, NOW, arena)
                    y, dy = backend.to_host(y).copy(), backend.from_host(self._numbers(4))
                    dx = _both_halves(layer, weights, dy, saved, gradients, arena)
                    arrays = (dx, *(slot.array for slot in slots.values()))
                    found[-1][name, depth] = [y, *map(backend.to_host, arrays)]
        for case, separate in found[1].items():
            assert all(map(np.array_equal, found[0][case], separate)), case

    def law_a_recomputed_layer_saves_its_input_alone_and_has_the_same_bits(
        self, plain: Plain, backend: Backend
    ):
        for name, kind in self.kinds(plain).items():
            for inner in (kind, plain.residual(kind)):
                found = []
                for layer in (inner, Recomputed(inner)):
                    for way in (_both_halves, backward):
                        weights, gradients, _, slots = self._placed(layer, backend)
                        arena, x = backend.arena(), backend.from_host(self._numbers(3))
                        y, saved = layer.forward(weights, x, NOW, arena)
                        assert layer is inner or saved[0] is x, name
                        y, dy = (backend.to_host(y).copy(), backend.from_host(self._numbers(4)))
                        dx = way(layer, weights, dy, saved, gradients, arena)
                        arrays = (dx, *(slot.array for slot in slots.values()))
                        found.append([y, *(backend.to_host(array).copy() for array in arrays)])
                        del dx, arrays, saved
                for other in found[1:]:
                    assert all(map(np.array_equal, found[0], other)), name

    def law_a_shortcut_has_the_gradient_of_its_sum(self, plain: Plain, backend: Backend):
        for name, kind in self.kinds(plain).items():
            for layer in (kind, plain.residual(kind), plain.residual(plain.residual(kind))):
                _noted(lambda: _assert_gradient(layer, backend), name)  # noqa: B023


def _noted(call, name):
    try:
        return call()
    except Exception as error:
        error.add_note(f"layer: {name}")
        raise


def _both_halves(layer, weights, dy, saved, gradients, arena):
    dx, pending = layer.backward_input(weights, dy, saved, arena)
    layer.backward_weight(pending, gradients, arena)
    return dx


def _assert_gradient(layer, backend: Backend):
    """Of x and of every parameter, along one direction each: central differences of the inner product of dy and y."""
    x, dy = numbers(3, 2, 5, WIDTH), numbers(4, 2, 5, WIDTH)
    weights, gradients, arrays, slots = placed(layer, backend)
    arena = backend.arena()

    def value(x):
        return np.vdot(
            dy, backend.to_host(layer.forward(weights, backend.from_host(x), NOW, arena)[0])
        )

    _, saved = layer.forward(weights, backend.from_host(x), NOW, arena)
    dx = backend.to_host(
        _both_halves(layer, weights, backend.from_host(dy), saved, gradients, arena)
    )
    direction = numbers(5, *x.shape)
    assert_near(
        np.vdot(dx, direction),
        (value(x + STEP * direction) - value(x - STEP * direction)) / (2 * STEP),
        "x",
    )
    for name, array in arrays.items():
        start = backend.to_host(array).copy()
        direction, ends = numbers(6, *array.shape), []
        for sign in (1, -1):
            array[...] = backend.from_host(start + sign * STEP * direction)
            ends.append(value(x))
        array[...] = backend.from_host(start)
        assert_near(
            np.vdot(backend.to_host(slots[name].array), direction),
            (ends[0] - ends[1]) / (2 * STEP),
            name,
        )


def assert_near(mine, truth, name):
    assert abs(mine - truth) <= 1e-6 * (1 + abs(truth)), (name, mine, truth)

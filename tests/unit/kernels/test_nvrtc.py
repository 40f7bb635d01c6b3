"""Every source compiles for real architectures, without a GPU, and needs no more than the hardware has."""

from itertools import cycle, product
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.kernels.loader import H100, Kernels
from mpitrain.kernels.source import package_sources
from mpitrain.ops.cuda.attention import choose
from mpitrain.ops.cuda.launches import SHARED
from mpitrain.ops.cuda.layers import row_threads
from mpitrain.ops.cuda.tiles import (
    FLOAT_TILES,
    TENSOR_TILES,
    TILES,
    FloatTile,
    MeasuredTiles,
    TensorTile,
    Tile,
    possible,
    two_stages,
)
from tests.unit.kernels.nvrtc import OLDEST, Compiler, usages
from tests.unit.kernels.sass import count, instructions, loops, loops_beside_work, main_loop

SOURCES = package_sources()
EVERYWHERE = [name for name in SOURCES if "hopper" not in name]  # those: test_hopper.py
ARCHITECTURES = ("sm_75", "sm_80", "sm_90a")
ELEMENTS = {"float": "float", "double": "double", "__half": "float", "__nv_bfloat16": "float"}
# A source without a branch on the architecture takes the next of these: the simulator compiles it for every type. Double, which
# is for proofs, is compiled by the oldest NVRTC alone.
WHERE = (("float", "sm_80"), ("__half", "sm_75"), ("__nv_bfloat16", "sm_90a"))
TILED = {"gemm": Tile, "gemm_tensor": TensorTile}
# Forward, input half, weight half of a linear layer: (TRANSPOSED_A, TRANSPOSED_B, ROW_SUMS).
PRODUCTS = ((0, 1, 0), (0, 0, 0), (1, 0, 1))

# What layers ask of an epilogue, together, and nothing.
ASKED = {"BETA": 0, "BIAS": 1, "SAVED": 1, "RESIDUAL": 1, "ACTIVATION": 1, "SPLIT": 0}
BARE = dict.fromkeys(ASKED, 0)
# Instructions of a product on tensor cores with either: chosen when it runs, an epilogue had 11,000. A multiprocessor's cache
# holds 8,192, and a block runs through its epilogue once.
MOST = {True: 2900, False: 1500}

# The tiles that GPT-2's large products take on sm_90a -> most instructions of the main loop for each product of tensor cores,
# and for each with row sums. Half of the products of row sums are another warp's. NVRTC 13.0.88 takes up to 0.6 more, and spills
# nothing either.
TAKEN = {
    TENSOR_TILES[0]: (2.75, 3.11),
    TENSOR_TILES[4]: (3.0, 3.65),
    TENSOR_TILES[5]: (2.5, 2.95),
    TENSOR_TILES[7]: (2.75, 3.3),
}
# Likewise of float32, as three products. Tensor cores make one of TF32 in 6.5 cycles of a scheduler, or 8 on sm_80.
TAKEN_FLOAT = {FLOAT_TILES[0]: (4.9, 5.2)}

ATTENTIONS = ("attention_tensor", "attention_tensor_backward")
GROUPED = {"GENERAL": 1, "GROUP": 4}

# Of attention on tensor cores, on sm_90a: kernel and head size -> products of a step, most instructions of the main loop for
# each, least warps on a multiprocessor. While tensor cores make a product, in 8 cycles on sm_80 and some 6.5 on sm_90, a warp
# scheduler issues one instruction a cycle. Four numbers of scores take 18 to 20 of these beside D / 8 products forward, D / 4
# and 3 D / 16 backward: most of all in the forward of narrow heads. Where the main loop masks, the mask counts, although it
# is jumped over. The limits hold for NVRTC 13.5.37 and 13.0.88.
LOOPS = {
    ("attention_tensor", 64): (128, 4.9, 8),
    ("attention_tensor", 128): (128, 4.65, 16),
    ("attention_tensor_backward_kv", 64): (128, 3.4, 8),
    ("attention_tensor_backward_kv", 128): (128, 2.85, 8),
    ("attention_tensor_backward_q", 64): (96, 3.65, 8),
    ("attention_tensor_backward_q", 128): (96, 3.7, 16),
}
# Likewise of float32 as three products of TF32, with one block of 8 warps on a multiprocessor. Beside its product each has the
# parts of its factors and the rounding sum to pay for. Heads above 64 have loops within the loop.
LOOPS_FLOAT = {
    "attention_tensor": (192, 6.2, 8),
    "attention_tensor_backward_kv": (192, 6.8, 8),
    "attention_tensor_backward_q": (144, 6.95, 8),
}

# Kernels that load and store 16 bytes of global memory at a time, whatever the type of elements.
EVERY_STEP = " ".join(SOURCES["steps"].kernels)
WIDE = {
    "ld": f"{EVERY_STEP} activation_backward activation_forward add add_bias add_into add_parts column_sums convert count_chosen "
    "count_digits cross_entropy cross_entropy_loss cross_entropy_split decode_fp16 decode_int8 embedding "
    "embedding_backward_positions embedding_backward_table encode_fp16 encode_int8 gemm_combine gradient_facts "
    "largest_is_target layer_norm layer_norm_backward "
    "layer_norm_backward_wide maximum_into row_argmax row_exponentials "
    "row_maximum sum_parts total weighted_sum write_chosen",
    "st": f"{EVERY_STEP} activation_backward activation_forward add add_bias add_into add_parts column_sums convert "
    "cross_entropy cross_entropy_split decode_fp16 decode_int8 embedding embedding_backward_positions embedding_backward_table "
    "encode_fp16 gemm_combine layer_norm layer_norm_backward "
    "layer_norm_backward_wide maximum_into weighted_sum",
}


def types(element: str) -> dict[str, object]:
    """Every macro that a source without tiles may need."""
    return {
        "Element": element,
        "Result": element,
        "Sum": ELEMENTS[element],
        "Index": "long long",
        "BLOCK": 256,
        "ROW_SUMS": 1,
        **ASKED,
        "HEAD": 64,
        "TILE": 64,
        "STEP": 64,
        "CHUNKED": 1,
    }


def attention_way(capability, head, dtype="float16"):
    """How attention is launched on a device, for aligned arrays; float32 by splitting."""
    kernels = Kernels(SimpleNamespace(capability=capability, takes_plain=True))
    kernels.tiles = MeasuredTiles(is_3xtf32=True)
    q, kv = (np.empty((1, 1, parts * head), dtype) for parts in (1, 2))
    way = choose(kernels, q, kv, 1, q)
    assert way.macros[0].defines["CHUNKED"] == 1, "NumPy's arrays begin at multiples of 16 bytes"
    return way


def jobs():
    """(source, architecture, macros) of everything that is compiled here, in the same order in every process."""
    simple = sorted({*EVERYWHERE} - {"gemm", "gemm_tensor", *ATTENTIONS})
    for name, (element, architecture) in zip(simple, cycle(WHERE)):
        yield name, architecture, types(element)
    for name, macro in (
        ("steps", "Mirror"),
        ("embedding", "Result"),
        ("columns", "Result"),
    ):  # of mixed precision
        short = "__nv_bfloat16"
        mixed = {macro: short if macro == "Mirror" else "float"}
        yield name, "sm_80", types("float" if macro == "Mirror" else short) | mixed
    yield "layer_norm", "sm_90a", types("__nv_bfloat16") | {"ROW_RUNS": 8}
    of_sums = types("float") | {"Result": "double", "Mirror": "__nv_bfloat16"}
    yield "tensor_steps", "sm_90a", of_sums
    for is_backward, name in enumerate(ATTENTIONS):
        for head in (64, 128):
            macros = attention_way(90, head).macros[is_backward].defines
            dims = {dim: macros[dim] for dim in ("HEAD", "STEP")}
            yield name, "sm_90a", types("__nv_bfloat16") | dims
        for capability, head, architecture, bounds in (
            (90, 64, "sm_90a", {}),
            (80, 64, "sm_80", {"DOCUMENTS": 2, "GENERAL": 1}),
            (90, 128, "sm_80", {"WINDOW": 1} | GROUPED),
        ):
            macros = attention_way(capability, head, "float32").macros[is_backward].defines
            dims = {dim: macros[dim] for dim in ("HEAD", "STEP")}
            yield name, architecture, types("float") | dims | bounds
        # It compiles there too, but `choose` takes it from sm_80 on.
        yield name, "sm_75", types("__half") | {"HEAD": 32, "STEP": 32}
    # Without what is this chip's alone, and with copies element by element.
    yield (
        "attention_tensor",
        "sm_90",
        types("__nv_bfloat16") | {"HEAD": 128, "STEP": 32, "CHUNKED": 0},
    )
    yield "attention_dropout", "sm_80", types("float") | {"DOCUMENTS": 1, "WINDOW": 1}
    yield "attention", "sm_80", types("float") | {"DOCUMENTS": 2, "GENERAL": 1}
    for name, step in zip(ATTENTIONS, (64, 32), strict=True):
        # The wide heads need registers most, and these bounds.
        for head, bounds in ((64, {"WINDOW": 1}), (128, {"DOCUMENTS": 2, "GENERAL": 1})):
            macros = types("__nv_bfloat16") | {"HEAD": head, "STEP": step} | bounds
            yield name, "sm_80", macros
    # Queries that continue a sequence, and heads of keys that several heads of queries share.
    yield "attention", "sm_80", types("float") | GROUPED
    for name, step in zip(ATTENTIONS, (64, 32), strict=True):
        yield name, "sm_80", types("__nv_bfloat16") | {"STEP": step} | GROUPED
    # Rows of experts; in the gradients of weights they are parts of sums.
    for ta, tb, grouped in ((0, 1, 1), (0, 0, 1), (1, 0, 2)):
        stored = {"TRANSPOSED_A": ta, "TRANSPOSED_B": tb, "ROW_SUMS": 0, "GROUPED": grouped} | BARE
        yield "gemm", "sm_80", types("float") | TILES[0]._asdict() | stored
        yield "gemm_tensor", "sm_90", types("__nv_bfloat16") | TENSOR_TILES[0]._asdict() | stored
    for (form, (ta, tb, sums)), architecture in product(enumerate(PRODUCTS), ARCHITECTURES):
        stored = {"TRANSPOSED_A": ta, "TRANSPOSED_B": tb, "ROW_SUMS": sums}
        if sums or architecture != "sm_75":
            for tile in TILES if sums and architecture == "sm_80" else TILES[:1]:
                yield "gemm", architecture, types("float") | tile._asdict() | stored
        if sums or architecture != "sm_75":
            for tile in {
                "sm_75": two_stages()[:1],
                "sm_80": TENSOR_TILES[: 4 if sums else 1],
                "sm_90a": [*TAKEN][form :: len(PRODUCTS)],  # each tile in one form
            }[architecture]:
                element = "__half" if architecture == "sm_75" else "__nv_bfloat16"
                macros = types(element) | tile._asdict() | stored
                if sums:  # gradients of weights are float32
                    yield "gemm_tensor", architecture, macros | {"Result": "float"} | BARE
                else:
                    yield "gemm_tensor", architecture, macros
        if architecture != "sm_75":
            for tile in FLOAT_TILES[:1] if (architecture == "sm_80") != (sums == 1) else ():
                macros = types("float") | tile._asdict() | stored
                yield "gemm_tensor", architecture, macros | BARE if sums else macros


@pytest.fixture(scope="module")
def compiler():
    return Compiler()


def called(name, architecture, macros):
    """The name of a job among the tests."""
    dims = (
        ("HEAD", "STEP")
        if name in ATTENTIONS
        else ("TILE_M", "TILE_N", "TILE_K", "WARP_M", "WARP_N")
    )
    tile = "x".join(str(macros[dim]) for dim in dims if dim in macros)
    transposed = "".join(
        "NT"[macros[flag]] for flag in ("TRANSPOSED_A", "TRANSPOSED_B") if flag in macros
    )
    element = macros["Element"]
    mixed = "".join(
        f" to {macros[macro]}"
        for macro in ("Result", "Mirror")
        if macros.get(macro, element) != element
    )
    words = {"DOCUMENTS": "documents", "WINDOW": "window", "GROUP": "grouped"}
    words |= {"GROUPED": "experts"}
    special = " ".join(word for macro, word in words.items() if macro in macros)
    return " ".join(filter(None, (name, architecture, element + mixed, tile, transposed, special)))


def is_large(name, architecture, macros):
    """True for the float32 product in its largest tile, on architectures where two blocks of it are to share a multiprocessor."""
    return (
        name == "gemm"
        and architecture != "sm_75"
        and "GROUPED" not in macros
        and (macros["TILE_M"], macros["TILE_N"]) == (128, 128)
    )


def is_taken(name, architecture, macros):
    """True for products in a tile of `TAKEN`, whose instructions are counted."""
    return name == "gemm_tensor" and architecture == "sm_90a"


def has_unmasked_loop(kernel, macros):
    """True where steps without masks have a loop of their own: elsewhere two loops would need more registers."""
    if kernel.endswith("kv"):
        return "DOCUMENTS" not in macros and "WINDOW" not in macros
    return macros["HEAD"] <= 64


def test_every_source_compiles_and_those_of_products_for_every_architecture():
    simple = sorted({*EVERYWHERE} - {*TILED, *ATTENTIONS})
    found = {(name, architecture) for name, architecture, _ in jobs()}
    assert found == {
        *((name, architecture) for name, (_, architecture) in zip(simple, cycle(WHERE))),
        *product(("gemm", "gemm_tensor", *ATTENTIONS), ARCHITECTURES),
        *product(("columns", "embedding", "steps", "attention", "attention_dropout"), ["sm_80"]),
        *product(("layer_norm", "tensor_steps"), ["sm_90a"]),
        ("attention_tensor", "sm_90"),
        ("gemm_tensor", "sm_90"),
    }
    assert {kernel for those in WIDE.values() for kernel in those.split()} <= {
        kernel for source in SOURCES.values() for kernel in source.kernels
    }
    assert sum(is_large(*job) for job in jobs()) == len(PRODUCTS) * 2
    assert sum(is_taken(*job) for job in jobs()) == len(TAKEN | TAKEN_FLOAT)


@pytest.mark.parametrize(
    ("name", "architecture", "macros"), [pytest.param(*job, id=called(*job)) for job in jobs()]
)
def test_a_source_compiles_within_the_hardwares_limits(name, architecture, macros, compiler):
    """A test a job, so that workers of pytest-xdist share them out."""
    compiled = compiler.compile(SOURCES[name], architecture, macros)
    kernels = usages(compiled.log)
    assert kernels.keys() == set(SOURCES[name].kernels)
    assert all(usage.shared <= 48 << 10 for usage in kernels.values()), (
        "static shared memory does not fit any device"
    )
    # The large float32 tile has 64 of 128 registers for its sums.
    most = 24 if is_large(name, architecture, macros) and architecture == "sm_80" else 0
    if name == "gemm" and "GROUPED" in macros:
        most = 84  # before the main loop and behind it, and at most two of its 629 instructions
    is_split = name in ATTENTIONS and macros["Element"] == "float"
    is_wide = name == "attention_tensor" and macros["HEAD"] == 128
    if is_wide and not is_split and "GENERAL" in macros:
        most = 16  # four of 128 registers, of sizes that are read once
    assert [kernel for kernel, usage in kernels.items() if usage.spilled > most] == []
    for kernel in kernels:
        wanted = {f"{verb} 16" for verb, those in WIDE.items() if kernel in those.split()}
        assert wanted <= compiled.accesses(kernel), f"{kernel} does not move 16 bytes at a time"
        assert compiled.divisions_in_loops(kernel) == [], (
            f"{kernel}: tens of instructions each, for which there is none"
        )
        places = [parameter.name for parameter in SOURCES[name].kernels[kernel].parameters]
        if "residual" in places and macros["RESIDUAL"]:  # its sum has the bits of a pass of its own
            sums = compiled.arithmetic_on(kernel, places.index("residual"))
            assert sums == {"add.rn.f32"}, kernel
    exact = [each for each in compiled.flushing if ".approx." not in each]
    assert exact == [], "a subnormal number differs from the host's"
    # x86-64 aligns every array to 16 bytes, so the simulator cannot see this.
    widest = max(compiled.shared_accesses, default=1)
    assert [
        array for array, alignment in compiled.shared_arrays.items() if alignment < widest
    ] == []
    if name in ("gemm", "attention") and macros["Element"] == "float":
        assert widest == 16, "shared memory is not read in fours"
    if name in TILED and architecture != "sm_75":
        kind = FloatTile if macros["Element"] == "float" and name == "gemm_tensor" else TILED[name]
        tile = kind(*(macros[field] for field in kind._fields))
        assert kernels[name].registers <= tile.registers, (
            "fewer blocks fit a multiprocessor than tiles are chosen for"
        )
    if is_taken(name, architecture, macros):
        resident = H100.resident(tile.threads, kernels[name].registers, tile.shared)
        assert resident * tile.threads == 256, "two warps for each scheduler"
        code = [each for each in instructions(compiled.code, name) if not each.endswith(":")]
        assert len(code) <= MOST[macros["BIAS"] == 1], "the epilogue is not rolled"
        products = tile.WARP_M // 16 * (tile.WARP_N // 8 + macros["ROW_SUMS"]) * tile.TILE_K // 16
        most = (TAKEN_FLOAT if tile.itemsize == 4 else TAKEN)[tile][macros["ROW_SUMS"]]
        check_loop(compiled.code, name, products * tile.slowness, most)
    if name in ATTENTIONS:
        for kernel in kernels:
            if has_unmasked_loop(kernel, macros):
                text = instructions(compiled.code, kernel)
                bodies = [[text[i] for i in loop] for loop in loops(text)]
                working = [body for body in bodies if count(body, "HMMA")]
                assert min(count(body, "FSEL") for body in working) == 0, (
                    f"{kernel}: all loops mask"
                )
    if name in ATTENTIONS and architecture == "sm_90a":
        way = attention_way(90, macros["HEAD"], "float32" if is_split else "float16")
        for kernel, usage in kernels.items():
            if is_split:
                products, most, warps = LOOPS_FLOAT[kernel]
            else:
                products, most, warps = LOOPS[kernel, macros["HEAD"]]
            check_loop(compiled.code, kernel, products, most)
            resident = H100.resident(
                way.threads, usage.registers, way.shared[name == ATTENTIONS[1]]
            )
            assert resident * way.threads >= 32 * warps, f"{kernel}: {usage}"


ONE_EXPONENTIAL = {
    "cross_entropy": ("cross_entropy", "cross_entropy_loss", "cross_entropy_split"),
    "pointwise": ("activation_forward", "activation_backward"),
}


@pytest.mark.parametrize("name", ONE_EXPONENTIAL)
def test_a_logit_and_a_gelu_take_one_exponential_each(name, compiler):
    """Loss: 8 logits a turn, and one exponential for the sum so far. GELU also has one reciprocal, and no slow tanh."""
    compiled = compiler.compile(SOURCES[name], "sm_90a", types("__nv_bfloat16"))
    for kernel in ONE_EXPONENTIAL[name]:
        text = instructions(compiled.code, kernel)
        assert count(text, "CALL") == 0 or name == "cross_entropy"
        bodies = [[text[i] for i in loop] for loop in loops(text)]
        wide = [body for body in bodies if count(body, "LDG.E.128") + count(body, "LDS.128")]
        if name == "pointwise":  # the loops of GELU and tanh; those of others have no reciprocal
            wide = [body for body in wide if count(body, "MUFU.RCP")]
        assert wide
        for body in wide:
            if name == "cross_entropy":
                runs = count(body, "LDG.E.128") + count(body, "LDS.128")
                assert count(body, "MUFU.EX2") <= 9 * runs and len(body) <= 80 * runs, kernel
            else:
                assert count(body, "MUFU.TANH") == 0 and len(body) <= 480, kernel


@pytest.mark.parametrize(
    ("name", "kernel", "macros", "work", "wait", "loads"),
    [
        ("layer_norm", "layer_norm", {"ROW_RUNS": 4}, "", "SHFL", 4),
        ("layer_norm", "layer_norm_backward", {}, "BAR", "BAR", 3),
        ("embedding", "embedding_backward_table", {"Result": "float"}, "LDG.E.128", "FADD", 8),
        ("cross_entropy", "cross_entropy_loss", {"Element": "float"}, "LDG.E.128", "FMNMX", 4),
    ],
)
def test_loads_of_rows_are_all_under_way_before_a_warp_waits(
    name, kernel, macros, work, wait, loads, compiler
):
    """The runs of a row; x, dy and residual of the next row; rows of the tokens of a chunk; runs of logits. None is loaded again
    later.
    """
    defines = types("__nv_bfloat16") | macros
    text = instructions(compiler.compile(SOURCES[name], "sm_90a", defines).code, kernel)
    text = main_loop(text, work) if work else text
    first = next(place for place, line in enumerate(text) if count([line], wait))
    assert count(text[:first], "LDG.E.128") == loads
    assert work == "" or count(text[first:], "LDG.E.128") == 0


def test_two_rows_of_logits_share_a_multiprocessor(compiler):
    """Of GPT-2 in 16-bit elements: one block of 512 threads writes its row while the other reads."""
    compiled = compiler.compile(SOURCES["cross_entropy"], "sm_90a", types("__nv_bfloat16"))
    used = usages(compiled.log)
    kernels = SimpleNamespace(engine=SimpleNamespace(multiprocessor=H100))
    for columns, size, threads in ((50257, 2, 512), (50257, 4, 1024), (4096, 4, 256)):
        assert row_threads(kernels, columns, columns * size) == (threads,)
    assert H100.resident(512, used["cross_entropy"].registers, 50257 * 2 + 256) == 2
    assert max(usage.registers for usage in used.values()) <= 64


def check_loop(code, kernel, products, most):
    """The main loop of a kernel is one step of so many products, and has at most so many instructions for each."""
    text = instructions(code, kernel)
    loop = main_loop(text, "HMMA")
    assert loops_beside_work(text, "HMMA") == [], "tensor cores wait for a serial loop"
    assert count(loop, "HMMA") == products, "the main loop is not one step"
    assert len(loop) <= most * products, (
        f"{kernel}: tensor cores wait for other instructions: {len(loop) / products:.2f}"
    )


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_source_compiles_by_the_oldest_nvrtc_that_is_promised(name):
    """It and NVRTC 13.0 refuse what newer ones let pass. One set of macros, up to PTX: what a source says is the same in all."""
    macros = next(macros for job, _, macros in jobs() if job == name)
    if name not in (*TILED, *ATTENTIONS, "top_k"):  # these know other types
        macros = types("double")
    compiled = Compiler(OLDEST).compile(SOURCES[name], "compute_80", macros)
    assert {f".entry {kernel}(" in compiled.ptx for kernel in SOURCES[name].kernels} == {True}


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 120])
def test_every_tile_of_tensor_cores_has_the_shared_memory_it_asks_for(capability):
    tiles = possible(np.empty(0, np.float16), capability)
    assert len(tiles) >= 6 and len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert tile.shared <= SHARED[capability]


@pytest.mark.parametrize("element", ["float", "double"])
def test_tiles_know_the_static_shared_memory_of_their_kernel(element, compiler):
    """In double the two largest tiles need more than any device has."""
    array = np.empty(0, "float64" if element == "double" else "float32")
    tiles = possible(array, 80)
    assert len(tiles) == len(TILES) - 2 * (element == "double")
    for tile in (tiles[1], tiles[-1]):
        stored = {"TRANSPOSED_A": 0, "TRANSPOSED_B": 1, "ROW_SUMS": 0}
        compiled = compiler.compile(
            SOURCES["gemm"], "sm_80", types(element) | tile._asdict() | stored
        )
        assert usages(compiled.log)["gemm"].shared == tile.static(array.itemsize) <= 48 << 10

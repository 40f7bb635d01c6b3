"""The ladder of products: every rung computes A B, and reads less of A and B than the one before."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import ConfigError
from mpitrain.kernels.source import package_sources
from mpitrain.tools.textbook.explain.tiling import (
    FOLDER,
    MACROS,
    RUNGS,
    SECTOR,
    SHAPE,
    ProductShape,
    climb,
)
from tests.unit.kernels.nvrtc import Compiler

pytestmark = pytest.mark.compile

SHAPES = (SHAPE, ProductShape(64, 128, 16), ProductShape(192, 64, 48))
LINES = 60
"""Lines of a page."""

climbed = cache(climb)

every_shape = pytest.mark.parametrize("shape", SHAPES)


@every_shape
def test_every_rung_computes_the_product_of_numpy(shape):
    for name, rung in climbed(shape).items():
        exact = rung.a.astype(np.float64) @ rung.b.astype(np.float64)
        assert np.array_equal(rung.c, exact), name


@every_shape
def test_sectors_of_a_rung_equal_its_formula(shape):
    for name, rung in climbed(shape).items():
        counted = rung.traffic.sectors
        assert (counted["A"], counted["B"]) == RUNGS[name].sectors(shape), name
        if name != "naive":
            assert counted["C"] * SECTOR == rung.c.nbytes, name


@every_shape
def test_each_rung_reads_less_than_the_one_before(shape):
    for before, after in pairwise(climbed(shape).values()):
        assert after.sectors < before.sectors


@every_shape
def test_an_element_is_read_once_for_each_tile_that_needs_it(shape):
    for name, rung in climbed(shape).items():
        rows, columns = (1, 1) if name in ("naive", "coalesced") else RUNGS[name].tile
        assert (rung.reads("A"), rung.reads("B")) == (shape.N / columns, shape.M / rows), name


def test_register_tiles_and_tensor_cores_spare_shared_memory():
    shared, registers, tensor = (climbed(SHAPE)[name] for name in [*RUNGS][2:])
    assert tensor.passes < registers.passes < shared.passes
    assert shared.conflicts == registers.conflicts == 0


def test_a_kernel_of_the_ladder_fits_on_a_page():
    assert {path.stem for path in FOLDER.glob("*.cu")} == {*RUNGS}
    for name in RUNGS:
        lines = (FOLDER / f"{name}.cu").read_text().splitlines()
        assert len(lines) <= LINES and max(map(len, lines)) <= 130, name


@pytest.mark.parametrize("name", RUNGS)
def test_a_kernel_of_the_ladder_compiles_for_a_gpu(name):
    code = Compiler().compile(package_sources(FOLDER)[name], "sm_80", MACROS.defines).code
    assert code


def test_the_topic_needs_a_compiler(no_compiler):
    done = CliRunner().invoke(commands, ["explain", "tiling"])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    assert "g++" in str(done.exception)

"""The laws of layers on a real GPU. Skipped where there is none."""

import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import backend_for
from mpitrain.ops import ops_for
from tests.laws.layers import LayerLaws
from tests.laws.transport import laws_of


@pytest.mark.gpu
@pytest.mark.parametrize("law", laws_of(LayerLaws))
def test_layers_on_the_gpu_obey(law):
    try:
        backend = backend_for("cuda")
    except ConfigError as error:
        pytest.skip(f"no GPU: {error}")
    getattr(LayerLaws(), law)(Plain(ops_for("cuda")), backend)

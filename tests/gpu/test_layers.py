"""The laws of layers on a real GPU. Skipped where there is none."""

import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.plain import Plain
from mpitrain.ops.device import device_for
from tests.laws.layers import LayerLaws
from tests.laws.transport import laws_of


@pytest.mark.gpu
@pytest.mark.parametrize("law", laws_of(LayerLaws))
def test_layers_on_the_gpu_obey(law):
    try:
        device = device_for("cuda")
    except ConfigError as error:
        pytest.skip(f"no GPU: {error}")
    getattr(LayerLaws(), law)(Plain(device.ops), device.backend)

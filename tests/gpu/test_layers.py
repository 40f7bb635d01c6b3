"""The laws of layers and operations on a real GPU. Skipped where there is none."""

import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.plain import Plain
from mpitrain.ops.device import device_for
from tests.laws.layers import LayerLaws
from tests.laws.operations import OperationLaws
from tests.laws.transport import laws_of


@pytest.fixture(name="device")
def gpu():
    try:
        return device_for("cuda")
    except ConfigError as error:
        pytest.skip(f"no GPU: {error}")


@pytest.mark.gpu
@pytest.mark.parametrize("law", laws_of(LayerLaws))
def test_layers_on_the_gpu_obey(law, device):
    getattr(LayerLaws(), law)(Plain(device.ops, backend=device.backend), device.backend)


@pytest.mark.gpu
@pytest.mark.parametrize("law", laws_of(OperationLaws))
def test_operations_on_the_gpu_obey(law, device):
    getattr(OperationLaws(), law)(device.ops, device.backend)

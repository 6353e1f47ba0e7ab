"""Hook models in each shape the contract knows."""

import pytest

from tests.unit.stage.toy import BatchModel, BatchMTPModel, ScalarModel, ScalarMTPModel, Steps


@pytest.fixture(
    params=[ScalarModel, BatchModel, ScalarMTPModel, BatchMTPModel], ids=["scalar", "batch", "scalar-mtp", "batch-mtp"]
)
def steps(request):
    """Steps over each kind of model."""
    return Steps(request.param())


@pytest.fixture(params=[ScalarMTPModel, BatchMTPModel], ids=["scalar-mtp", "batch-mtp"])
def mtp_steps(request):
    """Steps over each kind of model with runner-managed MTP."""
    return Steps(request.param())


@pytest.fixture
def batch_steps():
    """Steps over a model with a batch hook and without MTP."""
    return Steps(BatchModel())

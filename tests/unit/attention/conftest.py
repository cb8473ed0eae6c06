from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_per_rank() -> Iterator[None]:
    """Ranks are threads here: kernels with threads of their own would only fight over cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

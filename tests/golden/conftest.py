"""What golden tests have in common."""

from collections.abc import Iterator

import pytest

from tests.support.conversions import all_steps
from tests.support.evaluation import one_thread


@pytest.fixture(autouse=True, scope="module")
def _plain() -> Iterator[None]:
    """No bars of other libraries in what is compared, sums in one order, fits to their end."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with one_thread(), all_steps():
        yield

"""Models for the tests, each bound once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from linnet.plugins.interfaces import LoadOptions
from linnet.testing.backends import bind
from linnet.weights.binding import BoundModel
from linnet_torch.backend import TorchBackend
from linnet_torch.session import TorchSession

Load = Callable[..., TorchSession]


@pytest.fixture(scope="session")
def bound() -> Callable[[str], BoundModel]:
    """A variant of the F0 model by name, see ``linnet.testing.backends``."""
    models: dict[str, BoundModel] = {}

    def get(name: str) -> BoundModel:
        if name not in models:
            models[name] = bind(name)
        return models[name]

    return get


@pytest.fixture
def load(bound: Callable[[str], BoundModel]) -> Iterator[Load]:
    """A session on a variant, f32 on the CPU with 4 rows of 448 unless told otherwise."""
    sessions = []

    def start(name: str = "f0", **options: Any) -> TorchSession:
        given = {"dtype": "f32", "rows": 4, "max_seq": 448, "threads": 2} | options
        sessions.append(TorchBackend().load(bound(name), LoadOptions(**given)))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()

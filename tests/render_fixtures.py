"""What tests of rendered runs ask for, once a file; a pytest plugin, which they name in `pytest_plugins`."""

import pytest
from render_inputs import make_renderer

from artifacts.store import Store
from schemas.config import ModelConfig
from schemas.refs import Ref
from tasks.model import load_tokenizer, prepare_model
from tasks.renderer import Renderer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def model(store: Store) -> Ref:
    """The tiny model, in the store."""
    return prepare_model(ModelConfig(), store).model


@pytest.fixture(scope="module")
def renderer(model: Ref) -> Renderer:
    return make_renderer(load_tokenizer(model))

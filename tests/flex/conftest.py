"""Cache the kernels of these tests in a folder of the run."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNX_LOWERING_CACHE", str(folder))
        yield folder

"""Cache the kernels of these tests in a folder of the run that its processes share, with the objects of all tests."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from lowering.compiling.cache import object_cache


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, objects = tmp_path_factory.getbasetemp(), object_cache.folder()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    if objects is not None and not (folder / "objects").is_symlink():
        with suppress(FileExistsError):  # by another process
            (folder / "objects").symlink_to(objects)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNX_LOWERING_CACHE", str(folder))
        yield folder

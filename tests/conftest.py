"""Options of the test suite, and fixtures and hooks that all tests share.

`benchmarks` is a package of the checkout, after all that is installed. Random numbers of a test are its own.
`pytest --gpu` runs what compares answers under the emulation on the GPU of this machine (docs/howto/gpu_host.md).
"""

import gc
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.in_process import provide
from lowering.compiling.cache import artifact_cache
from tests.cuda_emulation import card
from tests.suite import durations, sweeps
from tests.support import records_of_runs, sampled, seeds, unoptimized

provide()

# Tests compile anew, whatever was compiled before: their GPU may be emulated, or a pass replaced.
_KEY = artifact_cache.key
pytest.MonkeyPatch().setattr(artifact_cache, "key", lambda *_: None)


@pytest.fixture
def artifacts_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache artifacts, as for users."""
    monkeypatch.setattr(artifact_cache, "key", _KEY)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Restart a module's generator, RNG, before each test, so that a test draws the same alone and among others."""
    if hasattr(request.module, "RNG"):
        seed = zlib.crc32(request.node.name.encode())
        print(f"RNG: default_rng({seed})")  # which pytest shows where the test fails
        request.module.RNG = np.random.default_rng(seed)


EXPENSIVE = {"tuning", "packaging", "serving"}
MEASURING = {"tuning", "profiling"}  # time, of code as users get it


def pytest_addoption(parser: pytest.Parser) -> None:
    records_of_runs.add_options(parser)
    durations.add_options(parser)
    parser.addoption("--sweep", choices=sweeps.list_sweeps(), help="run the slow tests of this sweep alone")
    parser.addoption("--gpu", action="store_true", help="run what compares answers of GPUs on the one of this machine")
    parser.addoption("--seed", type=int, help="draw other random cases: those of this number")
    parser.addoption("--sample", type=int, help="run this sample of long lists; else a tenth of the number of commits")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Select slow tests for a sweep. On a GPU all cores compile, and tests that share kernels stay in one process."""
    if config.getoption("sweep"):
        config.option.markexpr = "slow"
    if config.getoption("gpu") and getattr(config.option, "numprocesses", None):
        config.option.numprocesses, config.option.dist = os.cpu_count(), "loadgroup"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("sample") is not None or sampled.VARIABLE not in os.environ:
        number = config.getoption("sample")
        os.environ[sampled.VARIABLE] = str(sampled.choose_sample() if number is None else number)
    if config.getoption("seed") is not None:
        os.environ[seeds.VARIABLE] = str(config.getoption("seed"))
    seeds.renew()
    if config.getoption("gpu"):
        os.environ[card.VARIABLE] = "1"
    config.pluginmanager.register(records_of_runs.Records(config))
    config.pluginmanager.register(durations.Durations(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what brings the same cases back."""
    seed = config.getoption("seed")
    again = f"--sample {os.environ[sampled.VARIABLE]}" + (f" --seed {seed}" if seed is not None else "")
    terminalreporter.write_line(f"pytest {again} runs the same cases")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Modules with expensive fixtures come first: toward the end workers take tests from each other, and what two of
    them have of one module, both make fixtures for."""
    sampled.mark_others_as_slow(items)
    for item in items:
        if not MEASURING.isdisjoint(_folders(item)):
            item.add_marker(pytest.mark.optimized)
    items.sort(key=lambda item: EXPENSIVE.isdisjoint(_folders(item)))
    if sweep := config.getoption("sweep"):
        _select(config, items, lambda item: sweeps.find_sweep(item.nodeid) == sweep)
    if config.getoption("gpu"):
        _select(config, items, _needs_a_gpu)
        for item in items:
            if hasattr(item.module, "kernels") or hasattr(item.module, "KERNELS"):  # built once for all tests
                item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    unoptimized.select(item)


def _folders(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of the folders that a test is in, below that of this file."""
    return item.path.relative_to(Path(__file__).parent).parts[:-1]


def _select(config: pytest.Config, items: list[pytest.Item], is_selected: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = filter(is_selected, items)


def _needs_a_gpu(item: pytest.Item) -> bool:
    return "cuda" in _folders(item) and item.get_closest_marker("no_gpu") is None


def pytest_collection_finish() -> None:
    """Freeze the imported objects: searching them for garbage again and again takes a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)

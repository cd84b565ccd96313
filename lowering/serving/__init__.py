"""Serve many requests at once. Needs NumPy, but neither the compiler nor the runtime."""

from .batcher import Batcher as Batcher
from .blocks import PoolFullError as PoolFullError
from .paged_cache import PagedKVCache as PagedKVCache
from .paged_cache import Usage as Usage
from .request_error import RequestError as RequestError

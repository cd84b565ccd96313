"""Keys and values in memory: cache updates, and quantized caches on their way to tensor cores."""

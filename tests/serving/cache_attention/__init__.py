"""MultiHeadCacheAttention of OpenPPL."""

"""Workarounds of TVM 0.27; each names what it works around, and a test tells when it may go."""

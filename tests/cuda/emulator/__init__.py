"""The emulation itself."""

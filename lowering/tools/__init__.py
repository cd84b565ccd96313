"""The commands, and what they need beside compiling and running."""

"""The commands: arguments, calls of the library, and output."""

"""The commands: what each takes, calls and prints."""

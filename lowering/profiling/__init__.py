"""How long a model takes, and how long it should."""

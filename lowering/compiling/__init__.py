"""From an imported model to an artifact."""

"""Loading and running artifacts."""

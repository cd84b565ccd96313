"""Loading and importing of models."""

"""Verification and reduction of models."""

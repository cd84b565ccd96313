"""Recognizing decomposed operators."""

"""Databases of measurements, and their lookup during compilation."""

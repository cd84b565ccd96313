"""Operators that move, select or reshape elements."""

"""Measuring on other machines: servers that register at a tracker, all of them TVM's own."""

"""Measuring on other machines: servers that register with a tracker, all of them TVM's."""

"""Conversion of decoders to served decoders over pools of pages."""

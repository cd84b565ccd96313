"""Attention of OpenPPL and TensorRT-LLM."""

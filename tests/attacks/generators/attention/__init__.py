"""Attention of ONNX, FlexAttention and com.microsoft."""

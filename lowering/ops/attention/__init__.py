"""The attention operators of ai.onnx, and the steps that all attention operators share."""

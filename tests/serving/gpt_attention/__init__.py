"""gpt_attention of TensorRT-LLM."""

"""KV cache as distributed state for LLM serving."""

__version__ = "0.1.0"

"""Answers of a model: generation with a KV cache, the calculator, and the chat in a terminal."""

"""The GPT: layers, attention, loss and elementwise operations."""

"""The HTTP server: an API compatible with that of OpenAI, and a web page to chat with the model."""

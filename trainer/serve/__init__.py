"""The HTTP server: an API compatible with that of OpenAI, and a page to chat on."""

"""What clients speak: request models, OpenAI HTTP, streaming."""

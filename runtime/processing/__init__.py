"""CPU work on a request, before and after the engine: text, tokens, pictures, positions. No torch, no HTTP."""

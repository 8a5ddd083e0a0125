"""Fovea's engine. Knows nothing of HTTP.

The public face, all of it free of torch, is: `checkpoint`, `config`, `request`, `stats`, `client`, `process_client`,
`log`, `percentiles` and `processing`. Everything else is the engine's own and belongs to the engine process.
"""

"""Decides what each step computes: requests, KV blocks, image embeddings. Pure Python, without tensors or I/O."""

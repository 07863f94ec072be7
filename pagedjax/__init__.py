"""pagedjax: LLM inference in JAX from a paged KV cache."""

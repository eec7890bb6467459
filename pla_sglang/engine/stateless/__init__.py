"""A stateless instance (Arrow, arXiv 2505.11916, section 5.1): one engine that serves either phase of any request.

SGLang's aggregated loop runs as it is. Beside it stand both ends of SGLang's PD protocol on one KV pool: a sender for
requests whose prefill is wanted here, and a receiver for those whose decode is. See docs/reference/stateless.md.
"""

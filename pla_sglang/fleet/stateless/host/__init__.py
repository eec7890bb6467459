"""What a stateless instance asks of SGLang's functions, sockets, adapters and detokenizer. It knows nothing of legs."""

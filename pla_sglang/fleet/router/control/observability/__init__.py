"""What operators see: explanations, metrics, spans, recordings."""

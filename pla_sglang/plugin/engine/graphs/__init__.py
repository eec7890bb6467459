"""Our prefill graphs in the host.

``refusals``: what may be captured; ``attention``: the attention backends' state; ``host``: captured forward passes;
``runner``: stands in front of the host's own runner; ``handlers``: the seams.
"""

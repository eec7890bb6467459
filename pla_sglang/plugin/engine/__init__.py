"""Driver of the pure policies inside SGLang's processes.

``snapshot`` reads the host, ``apply`` writes to it, ``adapter`` connects both with the policy, ``handlers`` are the
functions that the seam table names.
"""

"""Several servers: router, cluster, and what makes an engine a stateless instance whose requests can move."""

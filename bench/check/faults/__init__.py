"""What befalls streams, instances and routers under load: one client, one judge, one table of faults."""

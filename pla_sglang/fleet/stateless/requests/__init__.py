"""What happens to a request at a stateless instance: it arrives, is paused, migrates or is computed again.

Scheduler processes have ``arrival``, ``pausing``, ``migration`` and ``admission``. The process that serves HTTP has
``http_frontend``, and ``streams`` with what it needs.
``commands``, ``messages`` and ``tags`` are what both say to each other.
"""

"""The instances behind a router: table, health, discovery, load reports."""

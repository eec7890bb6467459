"""Results for people: columns of tables, and pages of one file. Pure functions of results; needs no running server."""

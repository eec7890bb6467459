"""What versions of SGLang name or do otherwise: one function each, chosen by what the installed one has.

Only these modules know such names (``tests/patches/test_host_names.py``). Where all versions have a common word, such
as ``get_parallel()`` for ranks, everybody uses that and there is nothing here. Which version has what is found once,
at import, and by feature: a version number says nothing of a build of one's own.
"""

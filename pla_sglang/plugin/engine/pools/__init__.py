"""A short and a long pool inside one server (PLA-Serve section 3.2, spatial disaggregation, on data-parallel ranks).

Everything here but ``query`` runs in SGLang's data-parallel controller process: ``entry`` gets us into it, ``handlers``
are the functions that the seam table names, ``driver`` connects reports, dispatcher and pressure controller.
"""

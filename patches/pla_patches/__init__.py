"""How pla_sglang enters SGLang: host versions, seam table, installation, verification."""

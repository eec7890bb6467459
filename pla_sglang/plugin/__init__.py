"""One SGLang server: the engine's side of the plugin, its configuration, and the CPU platform."""

"""What every part of pla_sglang stands on: errors, flags, checks of values, files within bounds, keys, terminals."""

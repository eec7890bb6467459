"""Entry point of the SGLang plugin group ``sglang.srt.plugins``."""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in every process that loads plugins."""
    from pla_patches.install import install_for_this_process
    from pla_sglang.plugin.platform import is_active

    install_for_this_process(cpu_platform=is_active())

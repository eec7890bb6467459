"""What single parts cost."""

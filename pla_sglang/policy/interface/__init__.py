"""What drivers and policies exchange: views, decisions, reasons, step times."""

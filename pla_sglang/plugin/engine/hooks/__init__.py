"""What SGLang calls: one module for each process or concern that the seams enter."""

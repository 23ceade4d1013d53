"""In which order a guilty operator adds, revealed for a picture."""

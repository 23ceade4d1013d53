"""What every room uses and no user names: files, records, text, the machine, lazy names."""

"""What each position encoding is: one file each, found by scanning this folder. Only torch is imported here."""

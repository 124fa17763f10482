"""Where positions enter each model family: one file of names each, found by scanning this folder."""

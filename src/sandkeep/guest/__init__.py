"""The guest: process 1 of every sandbox. Stdlib only, Python 3.8 and newer, no import from the rest of Sandkeep."""

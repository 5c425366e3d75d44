"""Process groups, meshes and their supervision."""

"""Tasks in Harbor's format: a folder with an instruction, an environment and tests that write the reward."""

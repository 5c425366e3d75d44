"""What every process needs: errors, logging, signals, threads, processes, files, network."""

"""The jobs: each module has `launch` (starts the ranks here) and `run_rank` (is one of them)."""

"""What this machine is, and what runs on it: CPU and GPU targets, symbols that libraries need, child processes,
benchmarks, recorded CUDA graphs."""

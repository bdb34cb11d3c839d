"""What this machine is, and what runs on it: CPU and GPU targets, child processes, benchmarks, recorded CUDA graphs."""

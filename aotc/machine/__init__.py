"""What this machine is, and what runs on it (`compatibility`): CPU and GPU targets, symbols that libraries need, child
processes, `locks` between them, their memory, benchmarks, recorded CUDA graphs."""

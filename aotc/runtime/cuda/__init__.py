"""What only GPUs need: CUDA graphs, streams, the driver."""

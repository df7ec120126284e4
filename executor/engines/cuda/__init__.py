"""What engines need of an NVIDIA GPU, without torch."""

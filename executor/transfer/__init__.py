"""KV blocks from and for other instances. See README.md."""

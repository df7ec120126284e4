"""The wire contract, generated from the .proto files beside it by `scripts/proto_gen`."""

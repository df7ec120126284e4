"""The decisions, one a file: capacity, chunking, queues, prefix deferral, adapter pages, pause governor."""

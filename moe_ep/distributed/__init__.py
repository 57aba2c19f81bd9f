"""Process groups, exchanges between ranks on the CPU, rendezvous, and failure detection."""

"""`lmkit up`: a proxy and its replicas as a file describes them (docs/cluster.md)."""

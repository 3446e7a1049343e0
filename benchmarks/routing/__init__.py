"""The proxy's routing layer under a virtual clock: policies compared on nodes that exist only as numbers."""

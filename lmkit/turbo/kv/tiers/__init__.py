"""KV blocks below the device, in host memory and on disk, keyed by the hash of their content. No torch."""

"""KV blocks below the device: host memory and disk, by the hash of what they hold. No torch."""

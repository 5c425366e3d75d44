"""Communication between processes: messages, codec, sockets, keys, weight manifests."""
